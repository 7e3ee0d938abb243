// The copy kernels and how to launch one: all that is compiled for the GPU.
#pragma once

#include <hip/hip_runtime_api.h>

#include "../copy_params.h"

namespace hicache {

// Launches the kernel for `vector_bytes` (16, 8, 4, 2 or 1) with `blocks` blocks on `stream`.
hipError_t launch_copy(const CopyParams& params, int vector_bytes, unsigned blocks, hipStream_t stream);

// The address of the current device's lock for error records.
hipError_t error_lock_address(ErrorLock** lock);

}  // namespace hicache
