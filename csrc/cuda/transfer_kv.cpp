// transfer_kv on NVIDIA GPUs: chooses a method and runs it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>

#include "../copy_launches.h"
#include "../device_state.h"
#include "../entries.h"
#include "../known_calls.h"
#include "../plan.h"
#include "../transfer_kv.h"
#include "copy_engine.h"
#include "copy_kernel.h"
#include "entries.h"
#include "host_memory.h"
#include "runtime.h"
#include "staged.h"

namespace hicache {
namespace {

// Blocks of 1,024 threads with 4 vectors in flight each (H200, PCIe Gen5 x16, 2026-11-30). Loads need 8 for
// small rows and disturb nobody. Stores back up into the memory system that the model's own kernels
// need: 4 fill the link, 8 slow a GEMM beside them by 40 %.
constexpr int kLoadBlocks = 8;
constexpr int kStoreBlocks = 4;
// Rows of a big pool wait for address translation as well: 6 blocks move 49 to 51 GB/s where 4 move 35 to 37,
// and the product beside them is 12 % slower instead of 9 to 11.
constexpr int kSortedStoreBlocks = 6;

// Scattered small rows of a big host pool are limited by address translation, not by the link. Sorting
// the entries costs tens of microseconds (H200, 2026-11-30).
constexpr int64_t kSortMinEntries = 4096;
constexpr int64_t kSortMinBytes = int64_t{1} << 22;
constexpr int64_t kSortMaxRowBytes = 4096;
constexpr int64_t kSortMaxRunLength = 16;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int64_t block_limit(const TransferArgs& args, Direction direction, bool is_sorted) {
  if (args.max_blocks == 0)
    return direction == Direction::kLoad    ? kLoadBlocks
           : direction == Direction::kStore ? (is_sorted ? kSortedStoreBlocks : kStoreBlocks)
                                            : kOnDeviceBlocks;
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, args.device.index),
             "cudaDeviceGetAttribute");
  return std::min<int64_t>(args.max_blocks, processors);
}

// Bytes of one slot that lie together in the host pool.
int64_t host_row_bytes(const PlaneGroup& group, bool by_dst) {
  int64_t bytes = group.chunk_bytes;
  for (bool grows = true; grows;) {
    grows = false;
    for (const Loop& loop : group.loops)
      if ((by_dst ? loop.dst_stride_bytes : loop.src_stride_bytes) == bytes && loop.size > 1) {
        bytes *= loop.size;
        grows = true;
        break;
      }
  }
  return bytes;
}

bool sorting_pays(const TransferArgs& args, const Entries& entries, Direction direction,
                  const MethodTable& table) {
  const bool by_dst = direction == Direction::kStore;
  const auto& extents = by_dst ? args.dst_extents : args.src_extents;
  if (direction == Direction::kOnDevice || table.sort_min_span_bytes == 0 ||
      entries.num_entries < kSortMinEntries || entries.num_entries > kMaxInt32 ||
      std::max(args.dst_slots, args.src_slots) > kMaxInt32 ||
      entries.num_entries * args.bytes_per_entry() < kSortMinBytes)
    return false;
  int64_t row_bytes = 0, span_bytes = 0;
  for (const PlaneGroup& group : args.groups)
    row_bytes = std::max(row_bytes, host_row_bytes(group, by_dst));
  for (const Extent& extent : extents)
    span_bytes = std::max<int64_t>(span_bytes, extent.end - extent.begin);
  if (row_bytes >= kSortMaxRowBytes || span_bytes < table.sort_min_span_bytes)
    return false;
  return !args.has_cpu_indices() ||
         entries.num_entries < kSortMaxRunLength * static_cast<int64_t>(slot_runs(args).size());
}

void transfer_by_kernel(const TransferArgs& args, Direction direction, const ErrorSink& errors,
                        const MethodTable& table, cudaStream_t stream) {
  Entries entries = device_entries(args, stream);
  if (entries.num_entries == 0)
    return;
  const bool is_store = direction == Direction::kStore;
  const bool is_sorted = sorting_pays(args, entries, direction, table);
  if (is_sorted)
    sort_entries(entries, args, errors, is_store, stream);
  CopyParams params = copy_params(entries, args.dst_slots, args.src_slots, errors);
  const int64_t max_blocks = block_limit(args, direction, is_sorted);
  bool follows = false;
  for (const PlaneGroup& group : args.groups)
    for_each_launch(box_of(group, entries.num_entries, is_store), [&](const Box& box, int vector_bytes) {
      launch_copy(params, box, vector_bytes, max_blocks, follows, stream);
      follows = true;
    });
}

void transfer_kv_cuda(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                      const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                      const std::string& method, int64_t max_blocks) {
  const CudaHostMemoryMap map;
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, &map);
  const int32_t device_index = args.device.index;
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const cudaStream_t stream = current_stream(device_index);
  const bool capturing = is_capturing(stream);
  if (!capturing)
    throw_recorded_error(args.device, /*is_later_call=*/true);
  const MethodTable table = method_table(device_index);
  const Direction direction = direction_of(args, &is_host_memory);
  const Plan plan = choose_method(args, direction, capturing, table, /*explains=*/false);
  if (args.is_empty())
    return;
  const bool is_store = direction == Direction::kStore;
  if (plan.method == Method::kCopyEngine)
    return transfer_by_copy_engine(args, is_store, map, stream);
  const ErrorSink errors = next_error_sink(device_index);
  if (plan.method == Method::kStaged)
    return transfer_staged(args, is_store, errors, table, map, stream);
  transfer_by_kernel(args, direction, errors, table, stream);
}

std::string explain_cuda(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                         const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                         const std::optional<Tensor>& count, const std::string& method, int64_t max_blocks) {
  const CudaHostMemoryMap map;
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, &map);
  const torch::stable::accelerator::DeviceGuard guard(args.device.index);
  const bool capturing = is_capturing(current_stream(args.device.index));
  return plan_text(choose_method(args, direction_of(args, &is_host_memory), capturing,
                                 method_table(args.device.index), /*explains=*/true));
}

}  // namespace
}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CUDA, m) {
  m.impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_cuda));
  m.impl("transfer_known",
         TORCH_BOX((&hicache::transfer_known<hicache::transfer_kv_cuda, &hicache::page_indices>)));
  m.impl("keep_call", TORCH_BOX(&hicache::keep_call));
  m.impl("page_indices", TORCH_BOX(&hicache::page_indices));
  m.impl("explain", TORCH_BOX(&hicache::explain_cuda));
}
