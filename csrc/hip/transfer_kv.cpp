// transfer_kv on AMD GPUs: chooses a method and runs it.
#include "transfer_kv.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "../copy_launches.h"
#include "../device_state.h"
#include "../entries.h"
#include "../plan.h"
#include "copy_engine.h"
#include "copy_launch.h"
#include "host_memory.h"
#include "runtime.h"
#include "staged.h"
#include "upload.h"
// After runtime.h and upload.h, whose words it uses.
#include "../device_entries.h"

namespace hicache {
namespace {

// Blocks of 1,024 threads. Not measured here: 16 and later 32 are what others settled on for copies over the
// link on MI300 and MI355. `max_blocks` of a call overrides them.
constexpr int64_t kLinkBlocks = 32;

int64_t block_limit(const TransferArgs& args, Direction direction) {
  if (args.max_blocks == 0)
    return direction == Direction::kOnDevice ? kOnDeviceBlocks : kLinkBlocks;
  int processors = 0;
  check_hip(hipDeviceGetAttribute(&processors, hipDeviceAttributeMultiprocessorCount, args.device.index),
            "hipDeviceGetAttribute");
  return std::min<int64_t>(args.max_blocks, processors);
}

// Entries are not sorted by host address, as they are for NVIDIA: that pays by a measured gain, and nothing is
// measured here.
void transfer_by_kernel(const TransferArgs& args, Direction direction, const ErrorSink& errors,
                        hipStream_t stream) {
  const Entries entries = bring_entries(args, stream);
  if (entries.num_entries == 0)
    return;
  CopyParams params = copy_params(entries, args.dst_slots, args.src_slots, errors);
  const int64_t max_blocks = block_limit(args, direction);
  for (const PlaneGroup& group : args.groups)
    for_each_launch(box_of(group, entries.num_entries, direction == Direction::kStore),
                    [&](const Box& box, int vector_bytes) {
                      launch_copy(params, box, vector_bytes, max_blocks, /*follows=*/false, stream);
                    });
}

}  // namespace

void transfer_kv_hip(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                     const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                     const std::string& method, int64_t max_blocks) {
  const HipHostMemoryMap map;
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, &map);
  const int32_t device_index = args.device.index;
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const hipStream_t stream = current_stream(device_index);
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
  transfer_by_kernel(args, direction, errors, stream);
}

std::string explain_hip(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                        const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                        const std::optional<Tensor>& count, const std::string& method, int64_t max_blocks) {
  const HipHostMemoryMap map;
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, &map);
  const torch::stable::accelerator::DeviceGuard guard(args.device.index);
  const bool capturing = is_capturing(current_stream(args.device.index));
  return plan_text(choose_method(args, direction_of(args, &is_host_memory), capturing,
                                 method_table(args.device.index), /*explains=*/true));
}

}  // namespace hicache
