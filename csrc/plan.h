// Which method serves a call, and why. No device is asked: a backend states what it knows, so that the choice
// can be tested, and explained, anywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "transfer_kv.h"

namespace hicache {

enum class Direction { kLoad, kStore, kOnDevice };

// Of a call with an accelerator; `is_host_memory` tells whether an address that the device uses is the host's.
Direction direction_of(const TransferArgs& args, bool (*is_host_memory)(const void* device_address));

// What `hicache calibrate` measures. The defaults are an H200's (PCIe Gen5 x16, 2026-11-30): below the sizes
// the copy engine is slower than a kernel; above them it is as fast, and the model does not feel it.
struct MethodTable {
  int64_t copy_engine_min_row_bytes[2] = {int64_t{256} << 10, int64_t{256} << 10};  // load, store
  int64_t staged_min_row_bytes[2] = {int64_t{96} << 10, int64_t{96} << 10};         // load, store
  int64_t min_bytes = int64_t{4} << 20;  // of a call; smaller ones are a matter of latency, and a kernel's
  int64_t sort_min_span_bytes = int64_t{1} << 30;  // of a host pool whose scattered rows suffer; 0: none does
  // Of one buffer of the ring. A kernel of the model may hold all SMs for a millisecond and more, in which the
  // copy engine moves 55 MB: smaller buffers would leave it idle.
  int64_t staging_bytes = int64_t{96} << 20;
  int64_t staging_buffers = 3;
};
constexpr int kMethodTableSize = 8;
// In the order above. Throws std::invalid_argument for what makes no sense.
MethodTable method_table_from(const std::vector<int64_t>& values);

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

// What a call moves, as far as the host can tell: padding among indices on the device is counted.
int64_t moved_bytes(const TransferArgs& args);

// A plan as one JSON object.
std::string plan_text(const Plan& plan);

// A stretch of entries, neighbours in the caller's order, whose host slots ascend by one.
struct HostRun {
  int64_t host_slot;
  int64_t first_entry;
  int64_t length;
};

// All entries that move (`moves(entry)` may rule out more) as such stretches, in the caller's order and
// whatever the other side's slots are. The host pool's indices are on the CPU.
template <typename Moves>
std::vector<HostRun> host_runs(const TransferArgs& args, bool is_dst_host, const Moves& moves) {
  const int64_t* host = (is_dst_host ? args.dst_indices : args.src_indices).checked();
  const IndexView& other_view = is_dst_host ? args.src_indices : args.dst_indices;
  const int64_t* other = other_view.is_cpu ? other_view.checked() : host;
  const auto is_skipped = [&](int64_t i) {
    return host[i] < 0 || other[i] < 0 || args.is_overwritten(i) || !moves(i);
  };
  std::vector<HostRun> runs;
  const int64_t n = args.num_entries;
  for (int64_t i = 0; i < n;) {
    if (is_skipped(i)) {
      ++i;
      continue;
    }
    const int64_t first = i++;
    while (i < n && host[i] == host[first] + (i - first) && !is_skipped(i))
      ++i;
    runs.push_back({host[first], first, i - first});
  }
  return runs;
}

// What the stretches have of entries [first, first + size), in the order of their host slots.
std::vector<HostRun> sorted_part(const std::vector<HostRun>& runs, int64_t first, int64_t size);

const char* method_name(Method method);

// Copies that one submission to a copy engine holds. More gain nothing; CUDA had trouble near 50,000, HIP
// faults above 8,192 and Ascend takes 4,096.
constexpr int64_t kMaxBatchCopies = 4096;

}  // namespace hicache
