// Instructions of the vector unit: one value for each lane that EXEC names.
#include <map>

#include "wave.h"

namespace hip_interpreter {
namespace {

template <typename F>
void for_each_lane(const Wave& w, F f) {
  const uint64_t exec = w.exec();
  for (int lane = 0; lane < w.lanes; ++lane)
    if (exec >> lane & 1)
      f(lane);
}

template <typename F>
void unary32(Wave& w, const Instruction& i, F f) {
  for_each_lane(w, [&](int lane) { w.write32(i, i.operands[0], f(w.read32(i, i.operands[1], lane)), lane); });
}
template <typename F>
void binary32(Wave& w, const Instruction& i, F f) {
  for_each_lane(w, [&](int lane) {
    w.write32(i, i.operands[0], f(w.read32(i, i.operands[1], lane), w.read32(i, i.operands[2], lane)), lane);
  });
}
template <typename F>
void ternary32(Wave& w, const Instruction& i, F f) {
  for_each_lane(w, [&](int lane) {
    w.write32(
        i, i.operands[0],
        f(w.read32(i, i.operands[1], lane), w.read32(i, i.operands[2], lane), w.read32(i, i.operands[3], lane)),
        lane);
  });
}
// All bits of a comparison are new; those of inactive lanes are zero.
template <typename T, typename F>
void compare(Wave& w, const Instruction& i, F f) {
  const bool sets_exec = i.mnemonic.rfind("v_cmpx", 0) == 0;
  const size_t first = sets_exec && i.operands.size() == 2 ? 0 : 1;
  uint64_t result = 0;
  for_each_lane(w, [&](int lane) {
    T a, b;
    if constexpr (sizeof(T) == 8) {
      a = static_cast<T>(w.read64(i, i.operands[first], lane));
      b = static_cast<T>(w.read64(i, i.operands[first + 1], lane));
    } else {
      a = static_cast<T>(w.read32(i, i.operands[first], lane));
      b = static_cast<T>(w.read32(i, i.operands[first + 1], lane));
    }
    result |= uint64_t{f(a, b)} << lane;
  });
  w.set_mask(sets_exec ? static_cast<int>(kExec) : i.operands[0].index, result);
}
// A sum, its carries into a mask (`null`: nowhere), perhaps with carries of another mask.
void add_with_carry(Wave& w, const Instruction& i, bool has_carry_in) {
  uint64_t carries = 0;
  const uint64_t carry_in = has_carry_in ? w.mask(i.operands[4].index) : 0;
  for_each_lane(w, [&](int lane) {
    const uint64_t sum =
        uint64_t{w.read32(i, i.operands[2], lane)} + w.read32(i, i.operands[3], lane) + (carry_in >> lane & 1);
    w.write32(i, i.operands[0], static_cast<uint32_t>(sum), lane);
    carries |= (sum >> 32) << lane;
  });
  w.set_mask(i.operands[1].index, carries);
}
// The difference of operands `from` and `less`, its borrows into a mask, perhaps with borrows of another mask.
void subtract_with_borrow(Wave& w, const Instruction& i, int from, int less, bool has_borrow_in = false) {
  uint64_t borrows = 0;
  const uint64_t borrow_in = has_borrow_in ? w.mask(i.operands[4].index) : 0;
  for_each_lane(w, [&](int lane) {
    const uint64_t a = w.read32(i, i.operands[from], lane);
    const uint64_t b = uint64_t{w.read32(i, i.operands[less], lane)} + (borrow_in >> lane & 1);
    w.write32(i, i.operands[0], static_cast<uint32_t>(a - b), lane);
    borrows |= uint64_t{a < b} << lane;
  });
  w.set_mask(i.operands[1].index, borrows);
}
void multiply_add(Wave& w, const Instruction& i) {
  uint64_t carries = 0;
  for_each_lane(w, [&](int lane) {
    const uint64_t product = uint64_t{w.read32(i, i.operands[2], lane)} * w.read32(i, i.operands[3], lane);
    const uint64_t sum = product + w.read64(i, i.operands[4], lane);
    w.write64(i, i.operands[0], sum, lane);
    carries |= uint64_t{sum < product} << lane;
  });
  w.set_mask(i.operands[1].index, carries);
}
// Operand 3 is the mask; it is `vcc` where the text names none.
void conditional_move(Wave& w, const Instruction& i) {
  const uint64_t mask = w.mask(i.operands.size() > 3 ? i.operands[3].index : static_cast<int>(kVcc));
  for_each_lane(w, [&](int lane) {
    w.write32(i, i.operands[0], w.read32(i, i.operands[mask >> lane & 1 ? 2 : 1], lane), lane);
  });
}
void read_first_lane(Wave& w, const Instruction& i) {
  const uint64_t exec = w.exec();
  w.write32(i, i.operands[0], w.read32(i, i.operands[1], exec == 0 ? 0 : __builtin_ctzll(exec)));
}

uint32_t count_below(uint32_t mask, int bits) {
  return __builtin_popcountll(mask & ((uint64_t{1} << bits) - 1));
}

using u32 = uint32_t;
using u64 = uint64_t;

#define OP(...) [](Wave& w, const Instruction& i) { __VA_ARGS__; }
#define LANES(...) OP(for_each_lane(w, [&](int lane) { __VA_ARGS__; }))

const std::map<std::string, Handler> kHandlers = {
    {"v_mov_b32", OP(unary32(w, i, [](u32 a) { return a; }))},
    {"v_not_b32", OP(unary32(w, i, [](u32 a) { return ~a; }))},
    {"v_mov_b64", LANES(w.write64(i, i.operands[0], w.read64(i, i.operands[1], lane), lane))},
    {"v_pk_mov_b32", LANES({
       const u64 a = w.read64(i, i.operands[1], lane), b = w.read64(i, i.operands[2], lane);
       w.write64(i, i.operands[0], u32(a >> 32 * i.op_sel[0]) | u64{u32(b >> 32 * i.op_sel[1])} << 32, lane);
     })},
    {"v_add_u32", OP(binary32(w, i, [](u32 a, u32 b) { return a + b; }))},
    {"v_sub_u32", OP(binary32(w, i, [](u32 a, u32 b) { return a - b; }))},
    {"v_and_b32", OP(binary32(w, i, [](u32 a, u32 b) { return a & b; }))},
    {"v_or_b32", OP(binary32(w, i, [](u32 a, u32 b) { return a | b; }))},
    {"v_xor_b32", OP(binary32(w, i, [](u32 a, u32 b) { return a ^ b; }))},
    {"v_min_u32", OP(binary32(w, i, [](u32 a, u32 b) { return a < b ? a : b; }))},
    {"v_min_i32", OP(binary32(w, i, [](u32 a, u32 b) { return int32_t(a) < int32_t(b) ? a : b; }))},
    {"v_mul_lo_u32", OP(binary32(w, i, [](u32 a, u32 b) { return a * b; }))},
    {"v_mul_hi_u32", OP(binary32(w, i, [](u32 a, u32 b) { return u32(u64{a} * b >> 32); }))},
    {"v_lshlrev_b32", OP(binary32(w, i, [](u32 a, u32 b) { return b << (a & 31); }))},
    {"v_lshrrev_b32", OP(binary32(w, i, [](u32 a, u32 b) { return b >> (a & 31); }))},
    {"v_ashrrev_i32", OP(binary32(w, i, [](u32 a, u32 b) { return u32(int32_t(b) >> (a & 31)); }))},
    {"v_add3_u32", OP(ternary32(w, i, [](u32 a, u32 b, u32 c) { return a + b + c; }))},
    {"v_lshl_add_u32", OP(ternary32(w, i, [](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }))},
    {"v_lshl_or_b32", OP(ternary32(w, i, [](u32 a, u32 b, u32 c) { return (a << (b & 31)) | c; }))},
    {"v_lshlrev_b64",
     LANES(w.write64(i, i.operands[0],
                     w.read64(i, i.operands[2], lane) << (w.read32(i, i.operands[1], lane) & 63), lane))},
    {"v_lshl_add_u64",
     LANES(w.write64(i, i.operands[0],
                     (w.read64(i, i.operands[1], lane) << (w.read32(i, i.operands[2], lane) & 7)) +
                         w.read64(i, i.operands[3], lane),
                     lane))},
    {"v_add_co_u32", OP(add_with_carry(w, i, false))},
    {"v_addc_co_u32", OP(add_with_carry(w, i, true))},
    {"v_sub_co_u32", OP(subtract_with_borrow(w, i, 2, 3))},
    {"v_subrev_co_u32", OP(subtract_with_borrow(w, i, 3, 2))},
    {"v_subb_co_u32", OP(subtract_with_borrow(w, i, 2, 3, true))},
    {"v_subbrev_co_u32", OP(subtract_with_borrow(w, i, 3, 2, true))},
    {"v_mad_u64_u32", OP(multiply_add(w, i))},
    {"v_cndmask_b32", OP(conditional_move(w, i))},
    {"v_readfirstlane_b32", OP(read_first_lane(w, i))},
    {"v_readlane_b32",
     OP(w.write32(i, i.operands[0], w.read32(i, i.operands[1], w.read32(i, i.operands[2]) & (w.lanes - 1))))},
    // How many of the mask's lanes lie before this one.
    {"v_mbcnt_lo_u32_b32",
     LANES(w.write32(i, i.operands[0],
                     count_below(w.read32(i, i.operands[1], lane), lane < 32 ? lane : 32) +
                         w.read32(i, i.operands[2], lane),
                     lane))},
    {"v_mbcnt_hi_u32_b32",
     LANES(w.write32(i, i.operands[0],
                     count_below(w.read32(i, i.operands[1], lane), lane < 32 ? 0 : lane - 32) +
                         w.read32(i, i.operands[2], lane),
                     lane))},
};

#define COMPARISONS(type, name)                                                      \
  {"eq_" name, OP(compare<type>(w, i, [](type a, type b) { return a == b; }))},      \
      {"ne_" name, OP(compare<type>(w, i, [](type a, type b) { return a != b; }))},  \
      {"lt_" name, OP(compare<type>(w, i, [](type a, type b) { return a < b; }))},   \
      {"le_" name, OP(compare<type>(w, i, [](type a, type b) { return a <= b; }))},  \
      {"gt_" name, OP(compare<type>(w, i, [](type a, type b) { return a > b; }))}, { \
    "ge_" name, OP(compare<type>(w, i, [](type a, type b) { return a >= b; }))       \
  }

const std::map<std::string, Handler> kComparisons = {COMPARISONS(uint32_t, "u32"), COMPARISONS(int32_t, "i32"),
                                                     COMPARISONS(uint64_t, "u64"), COMPARISONS(int64_t, "i64")};

// Newer names of the same operations.
const std::map<std::string, std::string> kRenamed = {{"v_add_nc_u32", "v_add_u32"},
                                                     {"v_sub_nc_u32", "v_sub_u32"},
                                                     {"v_add_co_ci_u32", "v_addc_co_u32"},
                                                     {"v_sub_co_ci_u32", "v_subb_co_u32"},
                                                     {"v_subrev_co_ci_u32", "v_subbrev_co_u32"},
                                                     {"v_mad_co_u64_u32", "v_mad_u64_u32"}};

}  // namespace

Handler vector_handler(const std::string& mnemonic) {
  for (const std::string prefix : {"v_cmp_", "v_cmpx_"})
    if (mnemonic.rfind(prefix, 0) == 0) {
      const auto found = kComparisons.find(mnemonic.substr(prefix.size()));
      return found == kComparisons.end() ? nullptr : found->second;
    }
  const auto renamed = kRenamed.find(mnemonic);
  const auto found = kHandlers.find(renamed == kRenamed.end() ? mnemonic : renamed->second);
  return found == kHandlers.end() ? nullptr : found->second;
}

}  // namespace hip_interpreter
