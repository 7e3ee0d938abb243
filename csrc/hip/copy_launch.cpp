#include "copy_launch.h"

#include <algorithm>

#include "../page_indices.h"
#include "copy_kernels.h"
#include "runtime.h"

namespace hicache {

void launch_copy(CopyParams& params, const Box& box, int vector_bytes, int64_t max_blocks, bool /*follows*/,
                 hipStream_t stream) {
  const int stripes = stripes_of(vector_bytes, box.chunk_bytes);
  fill_box(params, box, vector_bytes, stripes);
  const int64_t tile_units = kCopyThreads * (kUnitsPerThread / stripes);
  const int64_t tiles = (params.num_units + tile_units - 1) / tile_units;
  const auto blocks = static_cast<unsigned>(std::min(tiles, max_blocks));
  check_hip(start_copy(params, vector_bytes, stripes, blocks, stream), "launching the copy kernel");
}

void select_skipped(const DeviceIndices& device_slots, int64_t first_entry, int64_t num_device_slots,
                    const int64_t* host_slots, int64_t size, int64_t* out, hipStream_t stream) {
  const int64_t blocks = (size + kSelectThreads - 1) / kSelectThreads;
  check_hip(
      start_select({device_slots, first_entry, num_device_slots, host_slots, out, static_cast<uint32_t>(size)},
                   static_cast<unsigned>(std::min<int64_t>(blocks, 1024)), stream),
      "launching the kernel that selects skipped entries");
}

Tensor page_indices(const Tensor& tokens, int64_t page_size) {
  const torch::stable::accelerator::DeviceGuard guard(tokens.get_device_index());
  return page_indices_by(tokens, page_size, [&](const PageParams& params) {
    check_hip(start_pages(params, current_stream(tokens.get_device_index())),
              "launching the kernel that makes pages of tokens");
  });
}

}  // namespace hicache
