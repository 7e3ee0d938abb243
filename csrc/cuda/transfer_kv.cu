// transfer_kv on NVIDIA GPUs: the kernel method.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "../copy_launches.h"
#include "../transfer_kv.h"
#include "device_state.h"
#include "entries.h"
#include "host_memory.h"
#include "runtime.h"
// After runtime.h, whose vectors it uses.
#include "../copy_rows.cuh"

namespace hicache {
namespace {

// Blocks of 512 threads with 8 vectors in flight each (H200, PCIe Gen5 x16, 2026-11-30). Loads need 8 for
// small rows and disturb nobody. Stores back up into the memory system that the model's own kernels
// need: 4 fill the link, 8 slow a GEMM beside them by 40 %.
constexpr int kLoadBlocks = 8;
constexpr int kStoreBlocks = 4;
constexpr int kOnDeviceBlocks = 64;

// Scattered small rows of a big host pool are limited by address translation, not by the link. Sorting
// the entries costs tens of microseconds (H200, 2026-11-30).
constexpr int64_t kSortMinEntries = 4096;
constexpr int64_t kSortMinBytes = int64_t{1} << 22;
constexpr int64_t kSortMinSpanBytes = int64_t{1} << 30;
constexpr int64_t kSortMaxRowBytes = 4096;
constexpr int64_t kSortMaxRunLength = 16;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

enum class Direction { kLoad, kStore, kOnDevice };

template <int kVectorBytes, typename Slot>
__global__ void __launch_bounds__(kCopyThreads, 1) copy_kernel(const __grid_constant__ CopyParams params) {
  copy_rows<kVectorBytes, Slot>(params);
}

// `follows` another launch of the same call: it may start while that one's last tiles are under way.
template <typename Kernel>
void start(Kernel* kernel, unsigned blocks, const CopyParams& params, bool follows, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kCopyThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = follows ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "launching the copy kernel");
}

void launch(const CopyParams& params, int vector_bytes, int64_t max_blocks, bool follows, cudaStream_t stream) {
  constexpr int64_t kTileUnits = kCopyThreads * kUnitsPerThread;
  const int64_t tiles = (params.num_units + kTileUnits - 1) / kTileUnits;
  const auto blocks = static_cast<unsigned>(std::min(tiles, max_blocks));
  const bool is_narrow = std::max(params.dst_slots, params.src_slots) <= kMaxInt32;
  const auto choose = [&](auto narrow, auto wide) {
    start(is_narrow ? narrow : wide, blocks, params, follows, stream);
  };
  switch (vector_bytes) {
    case 16:
      return choose(copy_kernel<16, int32_t>, copy_kernel<16, int64_t>);
    case 8:
      return choose(copy_kernel<8, int32_t>, copy_kernel<8, int64_t>);
    case 4:
      return choose(copy_kernel<4, int32_t>, copy_kernel<4, int64_t>);
    case 2:
      return choose(copy_kernel<2, int32_t>, copy_kernel<2, int64_t>);
    default:
      return choose(copy_kernel<1, int32_t>, copy_kernel<1, int64_t>);
  }
}

Direction direction_of(const TransferArgs& args) {
  // A tensor on the CPU is host memory; one of two on the device may be a view of it.
  const bool asks = !args.dst_device.is_cpu() && !args.src_device.is_cpu();
  const bool is_dst_host = asks ? is_host_memory(args.dst_extents[0].begin) : args.dst_device.is_cpu();
  const bool is_src_host = asks ? is_host_memory(args.src_extents[0].begin) : args.src_device.is_cpu();
  return is_dst_host ? Direction::kStore : is_src_host ? Direction::kLoad : Direction::kOnDevice;
}

int64_t block_limit(const TransferArgs& args, Direction direction) {
  if (args.max_blocks == 0)
    return direction == Direction::kLoad    ? kLoadBlocks
           : direction == Direction::kStore ? kStoreBlocks
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

bool sorting_pays(const TransferArgs& args, const Entries& entries, Direction direction) {
  const bool by_dst = direction == Direction::kStore;
  const auto& extents = by_dst ? args.dst_extents : args.src_extents;
  if (direction == Direction::kOnDevice || entries.num_entries < kSortMinEntries ||
      entries.num_entries > kMaxInt32 || std::max(args.dst_slots, args.src_slots) > kMaxInt32 ||
      entries.num_entries * args.bytes_per_entry() < kSortMinBytes)
    return false;
  int64_t row_bytes = 0, span_bytes = 0;
  for (const PlaneGroup& group : args.groups)
    row_bytes = std::max(row_bytes, host_row_bytes(group, by_dst));
  for (const Extent& extent : extents)
    span_bytes = std::max<int64_t>(span_bytes, extent.end - extent.begin);
  if (row_bytes >= kSortMaxRowBytes || span_bytes < kSortMinSpanBytes)
    return false;
  return !args.has_cpu_indices() ||
         entries.num_entries < kSortMaxRunLength * static_cast<int64_t>(slot_runs(args).size());
}

void refuse_what_is_missing(const TransferArgs& args, bool capturing) {
  if (args.method == Method::kCopyEngine || args.method == Method::kStaged)
    throw std::invalid_argument(std::string("[transfer_kv] method '") +
                                (args.method == Method::kStaged ? "staged" : "copy_engine") +
                                "' is not built yet; use 'auto' or 'kernel'.");
  if (capturing && (args.dst_indices.is_cpu || args.src_indices.is_cpu))
    throw std::invalid_argument(
        "[transfer_kv] indices on the CPU can't be captured, their values would be baked into the graph; "
        "put them on " +
        device_name(args.device) + ".");
  if (!args.unreachable.empty())
    throw std::invalid_argument("[transfer_kv] " + args.unreachable +
                                " is pageable host memory, which a kernel can't reach; allocate it with "
                                "torch_hicache.empty_host(shape, dtype, '" +
                                device_name(args.device) + "').");
}

void copy_groups(const TransferArgs& args, const Entries& entries, Direction direction, const ErrorSink& errors,
                 cudaStream_t stream) {
  CopyParams params;
  params.dst_indices = entries.dst;
  params.src_indices = entries.src;
  params.count = entries.count;
  params.num_entries = entries.num_entries;
  params.dst_slots = args.dst_slots;
  params.src_slots = args.src_slots;
  params.errors = errors;
  params.num_inline_entries = static_cast<int32_t>(entries.inline_dst.size());
  std::copy(entries.inline_dst.begin(), entries.inline_dst.end(), params.inline_indices[0]);
  std::copy(entries.inline_src.begin(), entries.inline_src.end(), params.inline_indices[1]);
  const int64_t max_blocks = block_limit(args, direction);
  bool follows = false;
  for (const PlaneGroup& group : args.groups)
    for_each_launch(box_of(group, entries.num_entries, direction == Direction::kStore),
                    [&](const Box& box, int vector_bytes) {
                      fill_box(params, box, vector_bytes);
                      launch(params, vector_bytes, max_blocks, follows, stream);
                      follows = true;
                    });
}

void transfer_kv_cuda(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                      const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                      const std::string& method, int64_t max_blocks) {
  const CudaHostMemoryMap map;
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, &map);
  const torch::stable::accelerator::DeviceGuard guard(args.device.index);
  const cudaStream_t stream = current_stream(args.device.index);
  const bool capturing = is_capturing(stream);
  if (!capturing)
    throw_recorded_error(args.device.index, /*is_later_call=*/true);
  refuse_what_is_missing(args, capturing);
  if (args.is_empty())
    return;
  const Direction direction = direction_of(args);
  const ErrorSink errors = next_error_sink(args.device.index);
  Entries entries = device_entries(args);
  if (entries.num_entries == 0)
    return;
  if (sorting_pays(args, entries, direction))
    sort_entries(entries, args, errors, direction == Direction::kStore, stream);
  copy_groups(args, entries, direction, errors, stream);
}

}  // namespace
}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CUDA, m) {
  m.impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_cuda));
}
