// transfer_kv on AMD GPUs: the kernel method.
#include "transfer_kv.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <stdexcept>

#include "../copy_launches.h"
#include "entries.h"
#include "../text.h"
#include "copy_kernels.h"
#include "device_state.h"
#include "host_memory.h"
#include "runtime.h"

namespace hicache {
namespace {

// Blocks of 1,024 threads. Not measured here: 16 and later 32 are what others settled on for copies over the
// link on MI300 and MI355. `max_blocks` of a call overrides them.
constexpr int64_t kLinkBlocks = 32;
constexpr int64_t kOnDeviceBlocks = 128;

// Entries are not sorted by host address, as they are for NVIDIA: that pays by a measured gain, and nothing is
// measured here.

enum class Direction { kLoad, kStore, kOnDevice };

Direction direction_of(const TransferArgs& args) {
  // A tensor on the CPU is host memory; one of two on the device may be a view of it.
  const bool asks = !args.dst_device.is_cpu() && !args.src_device.is_cpu();
  const bool is_dst_host = asks ? is_host_memory(args.dst_extents[0].begin) : args.dst_device.is_cpu();
  const bool is_src_host = asks ? is_host_memory(args.src_extents[0].begin) : args.src_device.is_cpu();
  return is_dst_host ? Direction::kStore : is_src_host ? Direction::kLoad : Direction::kOnDevice;
}

int64_t block_limit(const TransferArgs& args, Direction direction) {
  if (args.max_blocks == 0)
    return direction == Direction::kOnDevice ? kOnDeviceBlocks : kLinkBlocks;
  int processors = 0;
  check_hip(hipDeviceGetAttribute(&processors, hipDeviceAttributeMultiprocessorCount, args.device.index),
            "hipDeviceGetAttribute");
  return std::min<int64_t>(args.max_blocks, processors);
}

void refuse_what_is_missing(const TransferArgs& args, bool capturing) {
  if (args.method == Method::kCopyEngine || args.method == Method::kStaged)
    throw std::invalid_argument(concat("[transfer_kv] method '",
                                       args.method == Method::kStaged ? "staged" : "copy_engine",
                                       "' is not built yet; use 'auto' or 'kernel'."));
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
                 hipStream_t stream) {
  CopyParams params{};
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
  constexpr int64_t kTileUnits = kCopyThreads * kUnitsPerThread;
  const int64_t max_blocks = block_limit(args, direction);
  for (const PlaneGroup& group : args.groups)
    for_each_launch(box_of(group, entries.num_entries, direction == Direction::kStore),
                    [&](const Box& box, int vector_bytes) {
                      fill_box(params, box, vector_bytes);
                      const int64_t tiles = (params.num_units + kTileUnits - 1) / kTileUnits;
                      const auto blocks = static_cast<unsigned>(std::min(tiles, max_blocks));
                      check_hip(launch_copy(params, vector_bytes, blocks, stream), "launching the copy kernel");
                    });
}

}  // namespace

void transfer_kv_hip(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                     const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                     const std::string& method, int64_t max_blocks) {
  const HipHostMemoryMap map;
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, &map);
  const torch::stable::accelerator::DeviceGuard guard(args.device.index);
  const hipStream_t stream = current_stream(args.device.index);
  const bool capturing = is_capturing(stream);
  if (!capturing)
    throw_recorded_error(args.device, /*is_later_call=*/true);
  refuse_what_is_missing(args, capturing);
  if (args.is_empty())
    return;
  const Direction direction = direction_of(args);
  const ErrorSink errors = next_error_sink(args.device);
  const Entries entries = device_entries(args);
  if (entries.num_entries == 0)
    return;
  copy_groups(args, entries, direction, errors, stream);
}

}  // namespace hicache
