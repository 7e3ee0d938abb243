// The kernels of copy_kernels.hip in the words of the shared code.
#pragma once

#include <hip/hip_runtime_api.h>

#include "../copy_launches.h"

namespace hicache {

// Blocks of 1,024 threads for copies within device memory. Not measured.
constexpr int64_t kOnDeviceBlocks = 128;

// `box` is one that for_each_launch gives. `follows` is CUDA's: HIP's launches do not overlap.
void launch_copy(CopyParams& params, const Box& box, int vector_bytes, int64_t max_blocks, bool follows,
                 hipStream_t stream);

// out[e] = host_slots[e] where entry first_entry + e of `device_slots` is padding or out of range, else -1.
void select_skipped(const DeviceIndices& device_slots, int64_t first_entry, int64_t num_device_slots,
                    const int64_t* host_slots, int64_t size, int64_t* out, hipStream_t stream);

// The op of this name.
Tensor page_indices(const Tensor& tokens, int64_t page_size);

}  // namespace hicache
