// One wavefront, and one decoded instruction.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../hip_sim/runtime.h"

namespace hip_interpreter {

// Numbers of the scalar registers that have names.
enum Scalar { kVcc = 106, kTtmp = 108, kM0 = 125, kExec = 126, kNull = 128, kScalars = 130 };

struct Operand {
  // kFloat: one of the small ones inside an instruction, as the bits of 32; of 64 they would be others.
  enum Kind { kNone, kScalar, kVector, kConstant, kFloat, kOff } kind = kNone;
  int index = 0;            // of the first register
  int registers = 1;        // how many the text names
  int64_t value = 0;        // a constant
  bool is_literal = false;  // a constant of 32 bits behind the instruction, not a small one inside it
};

struct Wave;
struct Instruction;
using Handler = void (*)(Wave& wave, const Instruction& instruction);

struct Instruction {
  Handler handler = nullptr;
  std::string text;
  std::string mnemonic;
  std::vector<Operand> operands;
  int64_t offset = 0;  // of a memory access, bytes
  int op_sel[2] = {0, 0};
  bool returns = false;  // an atomic that gives the old value
  size_t target = 0;     // of a branch: its place in the program
};

[[noreturn]] inline void fail(const Instruction& instruction, const std::string& why) {
  throw std::runtime_error("hip_interpreter: " + why + " in: " + instruction.text);
}

struct Wave {
  int lanes;  // 32 or 64
  uint32_t scalars[kScalars] = {};
  bool scc = false;
  bool ended = false;
  size_t next = 0;
  uint32_t vectors[256][64] = {};
  const hip_sim::Launch* launch;
  const std::vector<char>* kernarg;

  uint64_t exec() const {
    return mask(kExec);
  }
  bool is_active(int lane) const {
    return exec() >> lane & 1;
  }
  // A mask of lanes: one register in wave32, two in wave64.
  uint64_t mask(int index) const {
    return lanes == 32 ? scalars[index] : scalars[index] | uint64_t{scalars[index + 1]} << 32;
  }
  void set_mask(int index, uint64_t value) {
    if (index == kNull)
      return;
    scalars[index] = static_cast<uint32_t>(value);
    if (lanes == 64)
      scalars[index + 1] = static_cast<uint32_t>(value >> 32);
  }

  uint32_t read32(const Instruction& at, const Operand& operand, int lane = 0) const {
    switch (operand.kind) {
      case Operand::kScalar:
        return scalars[operand.index];
      case Operand::kVector:
        return vectors[operand.index][lane];
      case Operand::kConstant:
      case Operand::kFloat:
        return static_cast<uint32_t>(operand.value);
      default:
        fail(at, "an operand that holds no value");
    }
  }
  // Small constants are extended by their sign, literals with zeros; where a literal's sign matters, nobody
  // here knows what was meant.
  uint64_t read64(const Instruction& at, const Operand& operand, int lane = 0) const {
    switch (operand.kind) {
      case Operand::kScalar:
        return scalars[operand.index] | uint64_t{scalars[operand.index + 1]} << 32;
      case Operand::kVector:
        return vectors[operand.index][lane] | uint64_t{vectors[operand.index + 1][lane]} << 32;
      case Operand::kConstant:
        if (operand.is_literal && operand.value >= int64_t{1} << 31 &&
            at.mnemonic.find("i64") != std::string::npos)
          fail(at, "a literal of unclear sign");
        return static_cast<uint64_t>(operand.value);
      default:
        fail(at, "an operand that holds no value");
    }
  }
  void write32(const Instruction& at, const Operand& operand, uint32_t value, int lane = 0) {
    if (operand.kind == Operand::kScalar && operand.index == kNull)
      return;
    if (operand.kind == Operand::kScalar)
      scalars[operand.index] = value;
    else if (operand.kind == Operand::kVector)
      vectors[operand.index][lane] = value;
    else
      fail(at, "a destination that is no register");
  }
  void write64(const Instruction& at, const Operand& operand, uint64_t value, int lane = 0) {
    if (operand.kind == Operand::kVector) {
      vectors[operand.index][lane] = static_cast<uint32_t>(value);
      vectors[operand.index + 1][lane] = static_cast<uint32_t>(value >> 32);
    } else if (operand.kind == Operand::kScalar) {
      scalars[operand.index] = static_cast<uint32_t>(value);
      scalars[operand.index + 1] = static_cast<uint32_t>(value >> 32);
    } else {
      fail(at, "a destination that is no register");
    }
  }
};

// The handler of a mnemonic without its encoding (_e32, _e64); null where this interpreter has none.
Handler scalar_handler(const std::string& mnemonic);
Handler vector_handler(const std::string& mnemonic);
Handler memory_handler(const std::string& mnemonic);

// The program of a kernel, from its disassembly.
std::vector<Instruction> decode(const std::string& disassembly);

}  // namespace hip_interpreter
