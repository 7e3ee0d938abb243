// The copy kernel of csrc/copy_rows.cuh, as a launch for one box.
#pragma once

#include <cuda_runtime.h>

#include "../copy_launches.h"

namespace hicache {

// Blocks for copies within device memory.
constexpr int kOnDeviceBlocks = 64;

// `box` is one that for_each_launch gives. `follows` another launch of the same call: it may start while that
// one's last tiles are under way.
void launch_copy(CopyParams& params, const Box& box, int vector_bytes, int64_t max_blocks, bool follows,
                 cudaStream_t stream);

}  // namespace hicache
