// Loads, stores and atomics. Each byte must be the GPU's: anything else is a failure.
#include <map>

#include "wave.h"

namespace hip_interpreter {
namespace {

char* checked(const Wave& w, const Instruction& i, uint64_t address, size_t nbytes, bool writes) {
  char* at = reinterpret_cast<char*>(address);
  const char* parameters = w.kernarg->data();
  if (at >= parameters && at + nbytes <= parameters + w.kernarg->size()) {
    if (writes)
      fail(i, "a store to the parameters");
    return at;
  }
  if (w.launch->is_device_range(at, nbytes) == 0)
    fail(i, std::to_string(nbytes) + " bytes at " + std::to_string(address) + " are not the GPU's");
  return at;
}

// `vector` holds addresses, or offsets of 32 bits from `base`.
uint64_t address_of(const Wave& w, const Instruction& i, const Operand& vector, const Operand& base, int lane) {
  if (base.kind == Operand::kOff)
    return w.read64(i, vector, lane) + i.offset;
  return w.read64(i, base) + w.read32(i, vector, lane) + i.offset;
}

template <int kBytes>
void scalar_load(Wave& w, const Instruction& i) {
  const Operand& offset = i.operands.at(2);
  if (offset.kind != Operand::kConstant && offset.index != kNull)
    fail(i, "an unknown form");
  const uint64_t address = w.read64(i, i.operands[1]) + offset.value + i.offset;
  std::memcpy(&w.scalars[i.operands[0].index], checked(w, i, address, kBytes, false), kBytes);
}

template <int kBytes>
void load(Wave& w, const Instruction& i) {
  // All addresses first: they may lie in the registers that are written.
  uint64_t addresses[64];
  for (int lane = 0; lane < w.lanes; ++lane)
    if (w.is_active(lane))
      addresses[lane] = address_of(w, i, i.operands[1], i.operands[2], lane);
  for (int lane = 0; lane < w.lanes; ++lane) {
    if (!w.is_active(lane))
      continue;
    uint32_t words[4] = {};
    std::memcpy(words, checked(w, i, addresses[lane], kBytes, false), kBytes);
    for (int k = 0; k < (kBytes + 3) / 4; ++k)
      w.vectors[i.operands[0].index + k][lane] = words[k];
  }
}

template <int kBytes>
void store(Wave& w, const Instruction& i) {
  for (int lane = 0; lane < w.lanes; ++lane) {
    if (!w.is_active(lane))
      continue;
    uint32_t words[4];
    for (int k = 0; k < (kBytes + 3) / 4; ++k)
      words[k] = w.vectors[i.operands[1].index + k][lane];
    const uint64_t address = address_of(w, i, i.operands[0], i.operands[2], lane);
    std::memcpy(checked(w, i, address, kBytes, true), words, kBytes);
  }
}

// f(old, data) is the new value. Data of a compare-and-swap are the new value, then the expected one.
template <typename F>
void atomic(Wave& w, const Instruction& i, F f) {
  const size_t first = i.returns ? 1 : 0;
  for (int lane = 0; lane < w.lanes; ++lane) {
    if (!w.is_active(lane))
      continue;
    const Operand& data = i.operands[first + 1];
    const uint64_t address = address_of(w, i, i.operands[first], i.operands[first + 2], lane);
    char* at = checked(w, i, address, 4, true);
    uint32_t old;
    std::memcpy(&old, at, 4);
    const uint32_t value =
        f(old, w.vectors[data.index][lane], w.vectors[data.index + data.registers - 1][lane]);
    std::memcpy(at, &value, 4);
    if (i.returns)
      w.write32(i, i.operands[0], old, lane);
  }
}
void swap(Wave& w, const Instruction& i) {
  atomic(w, i, [](uint32_t, uint32_t value, uint32_t) { return value; });
}
void compare_and_swap(Wave& w, const Instruction& i) {
  atomic(w, i, [](uint32_t old, uint32_t value, uint32_t expected) { return old == expected ? value : old; });
}

const std::map<std::string, Handler> kHandlers = {
    {"s_load_dword", scalar_load<4>},
    {"s_load_b32", scalar_load<4>},
    {"s_load_dwordx2", scalar_load<8>},
    {"s_load_b64", scalar_load<8>},
    {"s_load_b96", scalar_load<12>},
    {"s_load_dwordx4", scalar_load<16>},
    {"s_load_b128", scalar_load<16>},
    {"s_load_dwordx8", scalar_load<32>},
    {"s_load_b256", scalar_load<32>},
    {"global_load_dword", load<4>},
    {"global_load_b32", load<4>},
    {"global_load_dwordx2", load<8>},
    {"global_load_b64", load<8>},
    {"global_load_dwordx4", load<16>},
    {"global_load_b128", load<16>},
    {"global_load_ushort", load<2>},
    {"global_load_u16", load<2>},
    {"global_load_ubyte", load<1>},
    {"global_load_u8", load<1>},
    {"global_store_dword", store<4>},
    {"global_store_b32", store<4>},
    {"global_store_dwordx2", store<8>},
    {"global_store_b64", store<8>},
    {"global_store_dwordx4", store<16>},
    {"global_store_b128", store<16>},
    {"global_store_short", store<2>},
    {"global_store_b16", store<2>},
    {"global_store_byte", store<1>},
    {"global_store_b8", store<1>},
    {"global_atomic_swap", swap},
    {"global_atomic_swap_b32", swap},
    {"global_atomic_cmpswap", compare_and_swap},
    {"global_atomic_cmpswap_b32", compare_and_swap},
};

}  // namespace

Handler memory_handler(const std::string& mnemonic) {
  const auto found = kHandlers.find(mnemonic);
  return found == kHandlers.end() ? nullptr : found->second;
}

}  // namespace hip_interpreter
