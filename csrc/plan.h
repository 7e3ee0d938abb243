// Which method serves a call, and why. No device is asked: a backend states what it knows, so that the choice
// can be tested, and explained, anywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transfer_kv.h"

namespace hicache {

enum class Direction { kLoad, kStore, kOnDevice };

// What `hicache calibrate` measures. The defaults are an H200's (PCIe Gen5 x16, 2026-11-30): below the sizes
// the copy engine is slower than a kernel; above them it is as fast, and the model does not feel it.
struct MethodTable {
  int64_t copy_engine_min_row_bytes[2] = {int64_t{256} << 10, int64_t{128} << 10};  // load, store
  int64_t staged_min_row_bytes[2] = {int64_t{256} << 10, int64_t{128} << 10};       // load, store
  int64_t min_bytes = int64_t{4} << 20;  // of a call; smaller ones are a matter of latency, and a kernel's
  int64_t sort_min_span_bytes = int64_t{1} << 30;  // of a host pool whose scattered rows suffer; 0: none does
  int64_t staging_bytes = int64_t{32} << 20;       // of one buffer of the ring
  int64_t staging_buffers = 3;
};
constexpr int kMethodTableSize = 8;
MethodTable method_table_from(const int64_t* values);  // in the order above

struct Plan {
  Method method = Method::kKernel;
  int64_t runs = 0;     // of neighbouring slots, on both sides (copy_engine) or on the host's (staged)
  int64_t rows = 0;     // separate contiguous rows that the copy engine is asked for; 0 for a kernel
  int64_t batches = 0;  // submissions: launches of a kernel, batches of copies, or fillings of the ring
  int64_t bytes = 0;
  std::string reason;
};

// Throws std::invalid_argument where no method, or not the one that was asked for, can serve the call. Only
// where it `explains` are all numbers and the reason filled in: a small call has no time for them.
Plan choose_method(const TransferArgs& args, Direction direction, bool capturing, const MethodTable& table,
                   bool explains);

// A plan as one JSON object.
std::string plan_text(const Plan& plan);

// The host pool's slots as runs in ascending order, whatever the other side's are; its indices are on the CPU.
std::vector<SlotRun> host_slot_runs(const TransferArgs& args, bool is_dst_host);

const char* method_name(Method method);

// Copies that one submission to a copy engine holds. More gain nothing; CUDA had trouble near 50,000, HIP
// faults above 8,192 and Ascend takes 4,096.
constexpr int64_t kMaxBatchCopies = 4096;

}  // namespace hicache
