// The kernels and how to launch them: all that is compiled for the GPU.
#pragma once

#include <hip/hip_runtime_api.h>

#include "../copy_params.h"
#include "../page_params.h"

namespace hicache {

// A chunk whose quarters are whole lines of 128 bytes has its four vectors of a thread in one row each: one
// place to find instead of four. Narrower stripes would leave lines half written by an instruction.
constexpr int kStripes = kUnitsPerThread;
constexpr int kStripedVectorBytes = 16;
constexpr int stripes_of(int vector_bytes, int64_t chunk_bytes) {
  return vector_bytes == kStripedVectorBytes && chunk_bytes % (kStripes * 128) == 0 ? kStripes : 1;
}
static_assert(stripes_of(16, 1024) == 4 && stripes_of(16, 512) == 4, "rows of 1 KiB");
static_assert(stripes_of(16, 576) == 1 && stripes_of(16, 256) == 1 && stripes_of(8, 1024) == 1, "others");

// Launches the kernel for `vector_bytes` (16, 8, 4, 2 or 1) and `stripes` with `blocks` blocks on `stream`.
hipError_t start_copy(const CopyParams& params, int vector_bytes, int stripes, unsigned blocks,
                      hipStream_t stream);

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

hipError_t start_pages(const PageParams& params, hipStream_t stream);

// The address of the current device's lock for error records.
hipError_t find_error_lock(ErrorLock** lock);

}  // namespace hicache
