// Instructions of the scalar unit: one value for the wave.
#include <map>

#include "wave.h"

namespace hip_interpreter {
namespace {

template <typename F>
void binary32(Wave& w, const Instruction& i, F f) {
  w.write32(i, i.operands[0], f(w.read32(i, i.operands[1]), w.read32(i, i.operands[2])));
}
template <typename F>
void binary64(Wave& w, const Instruction& i, F f) {
  w.write64(i, i.operands[0], f(w.read64(i, i.operands[1]), w.read64(i, i.operands[2])));
}
// Bitwise: SCC tells whether the result is not zero.
template <typename F>
void logic32(Wave& w, const Instruction& i, F f) {
  const uint32_t value = f(w.read32(i, i.operands[1]), w.read32(i, i.operands[2]));
  w.write32(i, i.operands[0], value);
  w.scc = value != 0;
}
template <typename F>
void logic64(Wave& w, const Instruction& i, F f) {
  const uint64_t value = f(w.read64(i, i.operands[1]), w.read64(i, i.operands[2]));
  w.write64(i, i.operands[0], value);
  w.scc = value != 0;
}
// The old EXEC goes to the destination, f(source, EXEC) becomes the new one.
template <typename F>
void save_exec(Wave& w, const Instruction& i, F f) {
  const bool wide = w.lanes == 64;
  const uint64_t source = wide ? w.read64(i, i.operands[1]) : w.read32(i, i.operands[1]);
  const uint64_t before = w.exec();
  if (wide)
    w.write64(i, i.operands[0], before);
  else
    w.write32(i, i.operands[0], static_cast<uint32_t>(before));
  w.set_mask(kExec, f(source, before));
  w.scc = w.exec() != 0;
}
template <typename F>
void compare(Wave& w, const Instruction& i, F f) {
  w.scc = f(w.read32(i, i.operands[0]), w.read32(i, i.operands[1]));
}
void branch_if(Wave& w, const Instruction& i, bool taken) {
  if (taken)
    w.next = i.target;
}
int32_t as_signed(uint32_t value) {
  return static_cast<int32_t>(value);
}

using u32 = uint32_t;
using u64 = uint64_t;

#define OP(...) [](Wave& w, const Instruction& i) { __VA_ARGS__; }

const std::map<std::string, Handler> kHandlers = {
    {"s_mov_b32", OP(w.write32(i, i.operands[0], w.read32(i, i.operands[1])))},
    {"s_mov_b64", OP(w.write64(i, i.operands[0], w.read64(i, i.operands[1])))},
    {"s_and_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a & b; }))},
    {"s_or_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a | b; }))},
    {"s_xor_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a ^ b; }))},
    {"s_andn2_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a & ~b; }))},
    {"s_and_not1_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a & ~b; }))},
    {"s_and_b64", OP(logic64(w, i, [](u64 a, u64 b) { return a & b; }))},
    {"s_or_b64", OP(logic64(w, i, [](u64 a, u64 b) { return a | b; }))},
    {"s_xor_b64", OP(logic64(w, i, [](u64 a, u64 b) { return a ^ b; }))},
    {"s_andn2_b64", OP(logic64(w, i, [](u64 a, u64 b) { return a & ~b; }))},
    {"s_and_not1_b64", OP(logic64(w, i, [](u64 a, u64 b) { return a & ~b; }))},
    {"s_lshl_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a << (b & 31); }))},
    {"s_lshr_b32", OP(logic32(w, i, [](u32 a, u32 b) { return a >> (b & 31); }))},
    {"s_ashr_i32", OP(logic32(w, i, [](u32 a, u32 b) { return u32(as_signed(a) >> (b & 31)); }))},
    {"s_lshl_b64", OP(logic64(w, i, [](u64 a, u64 b) { return a << (b & 63); }))},
    {"s_add_u32", OP({
       const u64 sum = u64{w.read32(i, i.operands[1])} + w.read32(i, i.operands[2]);
       w.write32(i, i.operands[0], u32(sum));
       w.scc = sum >> 32 != 0;
     })},
    {"s_addc_u32", OP({
       const u64 sum = u64{w.read32(i, i.operands[1])} + w.read32(i, i.operands[2]) + w.scc;
       w.write32(i, i.operands[0], u32(sum));
       w.scc = sum >> 32 != 0;
     })},
    {"s_sub_u32", OP({
       const u32 a = w.read32(i, i.operands[1]), b = w.read32(i, i.operands[2]);
       w.write32(i, i.operands[0], a - b);
       w.scc = b > a;
     })},
    {"s_subb_u32", OP({
       const u32 a = w.read32(i, i.operands[1]);
       const u64 b = u64{w.read32(i, i.operands[2])} + w.scc;
       w.write32(i, i.operands[0], u32(a - b));
       w.scc = b > a;
     })},
    {"s_add_i32", OP({
       int32_t sum;
       const bool overflows = __builtin_add_overflow(as_signed(w.read32(i, i.operands[1])),
                                                     as_signed(w.read32(i, i.operands[2])), &sum);
       w.write32(i, i.operands[0], u32(sum));
       w.scc = overflows;
     })},
    {"s_add_nc_u64", OP(binary64(w, i, [](u64 a, u64 b) { return a + b; }))},
    {"s_sub_nc_u64", OP(binary64(w, i, [](u64 a, u64 b) { return a - b; }))},
    {"s_mul_u64", OP(binary64(w, i, [](u64 a, u64 b) { return a * b; }))},
    {"s_mul_hi_u32", OP(binary32(w, i, [](u32 a, u32 b) { return u32(u64{a} * b >> 32); }))},
    {"s_mul_i32", OP(binary32(w, i, [](u32 a, u32 b) { return a * b; }))},
    {"s_cselect_b32", OP(w.write32(i, i.operands[0], w.read32(i, i.operands[w.scc ? 1 : 2])))},
    {"s_cselect_b64", OP(w.write64(i, i.operands[0], w.read64(i, i.operands[w.scc ? 1 : 2])))},
    {"s_cmp_eq_u32", OP(compare(w, i, [](u32 a, u32 b) { return a == b; }))},
    {"s_cmp_lg_u32", OP(compare(w, i, [](u32 a, u32 b) { return a != b; }))},
    {"s_cmp_eq_i32", OP(compare(w, i, [](u32 a, u32 b) { return a == b; }))},
    {"s_cmp_lg_i32", OP(compare(w, i, [](u32 a, u32 b) { return a != b; }))},
    {"s_cmp_ge_u32", OP(compare(w, i, [](u32 a, u32 b) { return a >= b; }))},
    {"s_cmp_gt_u32", OP(compare(w, i, [](u32 a, u32 b) { return a > b; }))},
    {"s_cmp_lt_u32", OP(compare(w, i, [](u32 a, u32 b) { return a < b; }))},
    {"s_cmp_le_u32", OP(compare(w, i, [](u32 a, u32 b) { return a <= b; }))},
    {"s_cmp_gt_i32", OP(compare(w, i, [](u32 a, u32 b) { return as_signed(a) > as_signed(b); }))},
    {"s_cmp_lt_i32", OP(compare(w, i, [](u32 a, u32 b) { return as_signed(a) < as_signed(b); }))},
    {"s_cmp_eq_u64", OP(w.scc = w.read64(i, i.operands[0]) == w.read64(i, i.operands[1]))},
    {"s_cmp_lg_u64", OP(w.scc = w.read64(i, i.operands[0]) != w.read64(i, i.operands[1]))},
    {"s_bitcmp1_b32", OP(compare(w, i, [](u32 a, u32 b) { return (a >> (b & 31) & 1) == 1; }))},
    {"s_bitcmp0_b32", OP(compare(w, i, [](u32 a, u32 b) { return (a >> (b & 31) & 1) == 0; }))},
    {"s_and_saveexec_", OP(save_exec(w, i, [](u64 a, u64 exec) { return a & exec; }))},
    {"s_or_saveexec_", OP(save_exec(w, i, [](u64 a, u64 exec) { return a | exec; }))},
    {"s_andn2_saveexec_", OP(save_exec(w, i, [](u64 a, u64 exec) { return a & ~exec; }))},
    {"s_and_not1_saveexec_", OP(save_exec(w, i, [](u64 a, u64 exec) { return a & ~exec; }))},
    {"s_brev_b32", OP({
       u32 reversed = 0;
       for (int bit = 0; bit < 32; ++bit)
         reversed |= (w.read32(i, i.operands[1]) >> bit & 1) << (31 - bit);
       w.write32(i, i.operands[0], reversed);
     })},
    {"s_ff1_i32_b64", OP({
       const u64 value = w.read64(i, i.operands[1]);
       w.write32(i, i.operands[0], value == 0 ? ~u32{0} : __builtin_ctzll(value));
     })},
    {"s_ff1_i32_b32", OP({
       const u32 value = w.read32(i, i.operands[1]);
       w.write32(i, i.operands[0], value == 0 ? ~u32{0} : __builtin_ctz(value));
     })},
    {"s_branch", OP(branch_if(w, i, true))},
    {"s_cbranch_scc0", OP(branch_if(w, i, !w.scc))},
    {"s_cbranch_scc1", OP(branch_if(w, i, w.scc))},
    {"s_cbranch_vccz", OP(branch_if(w, i, w.mask(kVcc) == 0))},
    {"s_cbranch_vccnz", OP(branch_if(w, i, w.mask(kVcc) != 0))},
    {"s_cbranch_execz", OP(branch_if(w, i, w.exec() == 0))},
    {"s_cbranch_execnz", OP(branch_if(w, i, w.exec() != 0))},
    {"s_endpgm", OP(w.ended = true; (void)i)},
};

}  // namespace

Handler scalar_handler(const std::string& mnemonic) {
  std::string name = mnemonic;
  if (name == "s_add_co_i32")
    name = "s_add_i32";
  if (name.rfind("s_ctz_", 0) == 0)
    name = "s_ff1_" + name.substr(6);
  if (name == "s_add_co_u32")
    name = "s_add_u32";
  if (name == "s_add_co_ci_u32")
    name = "s_addc_u32";
  if (const size_t at = name.find("saveexec_"); at != std::string::npos)
    name = name.substr(0, at + 9);  // the wave's width tells how many bits
  const auto found = kHandlers.find(name);
  return found == kHandlers.end() ? nullptr : found->second;
}

}  // namespace hip_interpreter
