// The CUDA runtime in the few words that the shared code and this folder use: checked calls, streams, events,
// copies, streaming vectors. Nothing here knows of pools or indices.
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

using GpuStream = cudaStream_t;
using GpuEvent = cudaEvent_t;

// An event without a time.
inline GpuEvent new_event() {
  GpuEvent event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}
inline void destroy_event(GpuEvent event) {
  (void)cudaEventDestroy(event);
}
inline void record_event(GpuEvent event, GpuStream stream) {
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
}
inline void make_stream_wait(GpuStream stream, GpuEvent event) {
  check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}
inline void synchronize(GpuStream stream) {
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// Beside all others, with the highest priority that the device has.
inline GpuStream new_copy_stream() {
  int lowest = 0, highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  GpuStream stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
             "cudaStreamCreateWithPriority");
  return stream;
}

// Between any two kinds of memory that the runtime knows, and from pageable memory, for which the host waits.
inline void copy_async(void* dst, const void* src, size_t nbytes, GpuStream stream) {
  check_cuda(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}
inline void copy_strided_async(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                               size_t height, GpuStream stream) {
  check_cuda(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, cudaMemcpyDefault, stream),
             "cudaMemcpy2DAsync");
}

// Page-locked memory that host and device see at once, and the device's address of it. Never freed.
inline void* allocate_mapped_host(size_t nbytes, void** device_address, const char* what) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, nbytes, cudaHostAllocMapped | cudaHostAllocPortable), what);
  check_cuda(cudaHostGetDevicePointer(device_address, memory, 0), "cudaHostGetDevicePointer");
  return memory;
}
// Device memory full of zeros when the stream gets there. Never freed.
inline void* allocate_zeroed(size_t nbytes, GpuStream stream, const char* what) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, nbytes), what);
  check_cuda(cudaMemsetAsync(memory, 0, nbytes, stream), "cudaMemsetAsync");
  return memory;
}

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

// A pointer into global memory needs no other type here.
template <typename T>
__device__ inline T* as_global(T* address) {
  return address;
}

// Of the threads of a warp that call this together, the one with the least value.
__device__ inline bool has_least_of_lockstep(int64_t value) {
  const uint32_t lanes = __activemask();
  int64_t least = INT64_MAX;
  uint32_t least_lane = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const uint32_t lane = __ffs(left) - 1;
    const int64_t other = __shfl_sync(lanes, value, lane);
    if (other < least) {
      least = other;
      least_lane = lane;
    }
  }
  return least_lane == threadIdx.x % warpSize;
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
