// The kernels and how to launch them: all that is compiled for the GPU.
#pragma once

#include <hip/hip_runtime_api.h>

#include "../copy_params.h"

namespace hicache {

// Launches the kernel for `vector_bytes` (16, 8, 4, 2 or 1) with `blocks` blocks on `stream`.
hipError_t start_copy(const CopyParams& params, int vector_bytes, unsigned blocks, hipStream_t stream);

// What select_skipped (copy_launch.h) is told: out[e] = host_slots[e] where entry first_entry + e of
// `device_slots` is padding or out of range, else -1.
struct SelectParams {
  DeviceIndices device_slots;
  int64_t first_entry;
  int64_t num_device_slots;
  const int64_t* host_slots;
  int64_t* out;
  uint32_t size;
};
constexpr int kSelectThreads = 256;
hipError_t start_select(const SelectParams& params, unsigned blocks, hipStream_t stream);

// The address of the current device's lock for error records.
hipError_t find_error_lock(ErrorLock** lock);

}  // namespace hicache
