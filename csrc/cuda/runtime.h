// The CUDA runtime in the few words that the shared code and this folder use: checked calls, the
// current stream, streaming vectors. Nothing here knows of pools or indices.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <stdexcept>

#include "../text.h"

namespace hicache {

// Throws RuntimeError with the runtime's name for what went wrong; clears the runtime's copy of it.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess)
    return;
  (void)cudaGetLastError();
  throw std::runtime_error(concat("[transfer_kv] ", what, " failed: ", cudaGetErrorName(status), ": ",
                                  cudaGetErrorString(status), "."));
}

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Lets this thread allocate and wait while some stream captures in global mode: none of what the guard
// covers becomes part of that graph.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() {
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

#ifdef __CUDACC__
template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Type = int4;
};
template <>
struct VectorOf<8> {
  using Type = int2;
};
template <>
struct VectorOf<4> {
  using Type = int32_t;
};
template <>
struct VectorOf<2> {
  using Type = int16_t;
};
template <>
struct VectorOf<1> {
  using Type = int8_t;
};
template <int kBytes>
using Vector = typename VectorOf<kBytes>::Type;

// Rows are read once and written once: keep them from displacing the model's working set.
template <int kBytes>
__device__ inline Vector<kBytes> load_vector(const char* address) {
  return __ldcs(reinterpret_cast<const Vector<kBytes>*>(address));
}
template <int kBytes>
__device__ inline void store_vector(char* address, Vector<kBytes> value) {
  __stcs(reinterpret_cast<Vector<kBytes>*>(address), value);
}

template <typename T>
__device__ inline T* as_global(T* address) {
  return address;
}
__device__ inline unsigned thread_index() {
  return threadIdx.x;
}
__device__ inline unsigned block_index() {
  return blockIdx.x;
}
__device__ inline unsigned grid_blocks() {
  return gridDim.x;
}
#define HICACHE_RARE __noinline__
// Of lanes that can't but run together, the one with the least value. Here each lane makes progress of its own.
__device__ inline bool has_least_of_lockstep(int64_t) {
  return true;
}

// Launches of one call are independent of each other: the next may fill the SMs that this one's last tiles
// leave idle. It waits for this one before it ends, so that work behind the call finds all of it done.
__device__ inline void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
#endif

}  // namespace hicache
