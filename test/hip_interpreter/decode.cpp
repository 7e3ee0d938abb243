// From llvm-objdump's text to instructions. What is not known here is a failure, never skipped.
#include <cctype>
#include <map>
#include <sstream>

#include "wave.h"

namespace hip_interpreter {
namespace {

std::string trim(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::string without_encoding(const std::string& mnemonic) {
  for (const char* suffix : {"_e32", "_e64"})
    if (mnemonic.size() > 4 && mnemonic.compare(mnemonic.size() - 4, 4, suffix) == 0)
      return mnemonic.substr(0, mnemonic.size() - 4);
  return mnemonic;
}

bool parse_registers(const std::string& text, char letter, Operand& operand) {
  int first = 0, last = 0, used = 0;
  if (text[0] != letter)
    return false;
  if (std::sscanf(text.c_str() + 1, "[%d:%d]%n", &first, &last, &used) == 2 && used + 1 == int(text.size())) {
    operand.index = first;
    operand.registers = last - first + 1;
    return true;
  }
  if (std::sscanf(text.c_str() + 1, "%d%n", &first, &used) == 1 && used + 1 == int(text.size())) {
    operand.index = first;
    return true;
  }
  return false;
}

bool parse_operand(const std::string& text, Operand& operand) {
  static const std::map<std::string, std::pair<int, int>> kNames = {
      {"vcc", {kVcc, 2}},          {"vcc_lo", {kVcc, 1}},     {"exec", {kExec, 2}}, {"exec_lo", {kExec, 1}},
      {"exec_hi", {kExec + 1, 1}}, {"vcc_hi", {kVcc + 1, 1}}, {"null", {kNull, 1}}, {"m0", {kM0, 1}}};
  if (const auto found = kNames.find(text); found != kNames.end()) {
    operand.kind = Operand::kScalar;
    std::tie(operand.index, operand.registers) = found->second;
    return true;
  }
  if (text == "off") {
    operand.kind = Operand::kOff;
    return true;
  }
  if (text.rfind("ttmp", 0) == 0) {
    operand.kind = Operand::kScalar;
    operand.index = kTtmp + std::stoi(text.substr(4));
    return true;
  }
  if (parse_registers(text, 's', operand)) {
    operand.kind = Operand::kScalar;
    return true;
  }
  if (parse_registers(text, 'v', operand)) {
    operand.kind = Operand::kVector;
    return true;
  }
  static const std::map<std::string, uint32_t> kFloats = {
      {"0.5", 0x3f000000}, {"-0.5", 0xbf000000}, {"1.0", 0x3f800000}, {"-1.0", 0xbf800000},
      {"2.0", 0x40000000}, {"-2.0", 0xc0000000}, {"4.0", 0x40800000}, {"-4.0", 0xc0800000}};
  if (const auto found = kFloats.find(text); found != kFloats.end()) {
    operand.kind = Operand::kFloat;
    operand.value = found->second;
    return true;
  }
  size_t used = 0;
  try {
    operand.value = std::stoll(text, &used, 0);
  } catch (const std::exception&) {
    return false;
  }
  operand.kind = Operand::kConstant;
  operand.is_literal = text.rfind("0x", 0) == 0;
  return used == text.size();
}

// Words behind the operands: cache hints mean nothing here, the rest changes what is done.
void parse_modifier(const std::string& word, Instruction& instruction) {
  static const char* const kHints[] = {
      "nt", "sc1", "slc", "dlc", "scope:SCOPE_DEV", "scope:SCOPE_SYS", "th:TH_LOAD_NT", "th:TH_STORE_NT"};
  for (const char* hint : kHints)
    if (word == hint)
      return;
  if (word == "glc" || word == "sc0" || word == "th:TH_ATOMIC_RETURN")
    instruction.returns = instruction.mnemonic.find("atomic") != std::string::npos;
  else if (word.rfind("offset:", 0) == 0)
    instruction.offset = std::stoll(word.substr(7), nullptr, 0);
  else if (std::sscanf(word.c_str(), "op_sel:[%d,%d]", &instruction.op_sel[0], &instruction.op_sel[1]) != 2)
    fail(instruction, "an unknown modifier '" + word + "'");
}

// Waits, hints and cache maintenance: this interpreter has no caches and nothing in flight.
bool does_nothing(const std::string& mnemonic) {
  static const char* const kNames[] = {
      "s_nop",          "s_waitcnt",  "s_clause",    "s_delay_alu",        "s_sendmsg",
      "s_wait_",        "buffer_inv", "buffer_wbl2", "buffer_wbinvl1_vol", "buffer_gl0_inv",
      "buffer_gl1_inv", "global_inv", "global_wb",   "s_waitcnt_",         "s_set_inst_prefetch_distance"};
  for (const std::string name : kNames)
    if (mnemonic == name || (name.back() == '_' && mnemonic.rfind(name, 0) == 0) ||
        (name == "buffer_inv" && mnemonic == "buffer_invl2"))
      return true;
  return false;
}

void nothing(Wave&, const Instruction&) {}

// What lies behind a program's end to fill a cache line.
void illegal(Wave&, const Instruction& instruction) {
  fail(instruction, "an illegal instruction");
}

Instruction decode_one(const std::string& text) {
  Instruction instruction;
  instruction.text = text;
  std::istringstream words(text);
  words >> instruction.mnemonic;
  instruction.mnemonic = without_encoding(instruction.mnemonic);
  if (does_nothing(instruction.mnemonic)) {
    instruction.handler = nothing;
    return instruction;
  }
  if (instruction.mnemonic == "v_illegal" || instruction.mnemonic == "s_code_end") {
    instruction.handler = illegal;
    return instruction;
  }
  for (const auto& find : {scalar_handler, vector_handler, memory_handler})
    if (instruction.handler == nullptr)
      instruction.handler = find(instruction.mnemonic);
  if (instruction.handler == nullptr)
    fail(instruction, "an unknown instruction");
  std::string rest;
  std::getline(words, rest);
  std::istringstream parts(rest);
  for (std::string part; std::getline(parts, part, ',');) {
    std::istringstream tokens(trim(part));
    std::string word;
    tokens >> word;
    // "op_sel:[0,1]" holds a comma of its own.
    if (word.find(']') != std::string::npos && word.find('[') == std::string::npos)
      continue;
    Operand operand;
    if (!parse_operand(word, operand))
      fail(instruction, "an unknown operand '" + word + "'");
    instruction.operands.push_back(operand);
    while (tokens >> word) {
      if (word.rfind("op_sel:[", 0) == 0)
        word = rest.substr(rest.find("op_sel:["),
                           rest.find(']', rest.find("op_sel:[")) + 1 - rest.find("op_sel:["));
      parse_modifier(word, instruction);
    }
  }
  return instruction;
}

}  // namespace

std::vector<Instruction> decode(const std::string& disassembly) {
  std::vector<Instruction> program;
  std::map<uint64_t, size_t> place;  // of the instruction at an address
  std::map<size_t, uint64_t> targets;
  uint64_t start = 0;
  std::istringstream lines(disassembly);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && std::isxdigit(line[0]) && line.back() == ':' && line.find('<') != std::string::npos)
      start = std::stoull(line, nullptr, 16);
    const size_t comment = line.find("//");
    if (line.empty() || line[0] != '\t' || comment == std::string::npos)
      continue;
    const std::string text = trim(line.substr(0, comment));
    place[std::stoull(line.substr(comment + 2), nullptr, 16)] = program.size();
    if (text.rfind("s_branch", 0) == 0 || text.rfind("s_cbranch", 0) == 0) {
      const size_t plus = line.rfind("+0x");
      targets[program.size()] =
          start + (plus == std::string::npos ? 0 : std::stoull(line.substr(plus + 1), nullptr, 16));
    }
    // Two operations in one: neither may read what the other writes.
    const size_t dual = text.find(" :: ");
    if (dual == std::string::npos) {
      program.push_back(decode_one(text));
      continue;
    }
    const auto half = [](const std::string& part) {
      return decode_one("v_" + part.substr(part.find("v_dual_") + 7));
    };
    const Instruction first = half(text.substr(0, dual)), second = half(text.substr(dual + 4));
    for (size_t k = 1; k < second.operands.size(); ++k)
      if (second.operands[k].kind == Operand::kVector && second.operands[k].index == first.operands[0].index)
        fail(second, "a pair whose second half reads what the first writes");
    program.push_back(first);
    program.push_back(second);
  }
  for (const auto& [branch, address] : targets) {
    if (place.count(address) == 0)
      fail(program[branch], "a branch out of the kernel");
    program[branch].target = place[address];
  }
  return program;
}

}  // namespace hip_interpreter
