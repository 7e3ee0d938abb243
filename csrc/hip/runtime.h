// HIP in the few words that the shared code and this folder use: checked calls, streams, events,
// copies, and the device's words (streaming vectors, thread numbers, fences). Nothing here knows of pools or
// indices, or of torch's headers: copy_kernels.hip is compiled without them.
//
// The device's words are the compiler's own builtins, so that the kernels need neither ROCm's headers for the
// device nor its device libraries.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>
#include <stdexcept>

#include "../text.h"

namespace hicache {

// Throws RuntimeError with the runtime's name for what went wrong; clears the runtime's copy of it.
inline void check_hip(hipError_t status, const char* what) {
  if (status == hipSuccess)
    return;
  (void)hipGetLastError();
  throw std::runtime_error(concat("[transfer_kv] ", what, " failed: ", hipGetErrorName(status), ": ",
                                  hipGetErrorString(status), "."));
}

// The stream that torch's current one on this device stands for.
hipStream_t current_stream(int32_t device_index);

inline bool is_capturing(hipStream_t stream) {
  hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
  check_hip(hipStreamIsCapturing(stream, &status), "hipStreamIsCapturing");
  return status != hipStreamCaptureStatusNone;
}

// Lets this thread allocate and wait while some stream captures in global mode: none of what the guard
// covers becomes part of that graph.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check_hip(hipThreadExchangeStreamCaptureMode(&mode_), "hipThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() {
    (void)hipThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  hipStreamCaptureMode mode_ = hipStreamCaptureModeRelaxed;
};

using GpuStream = hipStream_t;
using GpuEvent = hipEvent_t;

// An event without a time.
inline GpuEvent new_event() {
  GpuEvent event = nullptr;
  check_hip(hipEventCreateWithFlags(&event, hipEventDisableTiming), "hipEventCreateWithFlags");
  return event;
}
inline void destroy_event(GpuEvent event) {
  (void)hipEventDestroy(event);
}
inline void record_event(GpuEvent event, GpuStream stream) {
  check_hip(hipEventRecord(event, stream), "hipEventRecord");
}
inline void make_stream_wait(GpuStream stream, GpuEvent event) {
  check_hip(hipStreamWaitEvent(stream, event, 0), "hipStreamWaitEvent");
}
inline void synchronize(GpuStream stream) {
  check_hip(hipStreamSynchronize(stream), "hipStreamSynchronize");
}

// Beside all others, with the highest priority that the device has.
inline GpuStream new_copy_stream() {
  int lowest = 0, highest = 0;
  check_hip(hipDeviceGetStreamPriorityRange(&lowest, &highest), "hipDeviceGetStreamPriorityRange");
  GpuStream stream = nullptr;
  check_hip(hipStreamCreateWithPriority(&stream, hipStreamNonBlocking, highest), "hipStreamCreateWithPriority");
  return stream;
}

// Between any two kinds of memory that the runtime knows, and from pageable memory, for which the host waits.
inline void copy_async(void* dst, const void* src, size_t nbytes, GpuStream stream) {
  check_hip(hipMemcpyAsync(dst, src, nbytes, hipMemcpyDefault, stream), "hipMemcpyAsync");
}
inline void copy_strided_async(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                               size_t height, GpuStream stream) {
  check_hip(hipMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, hipMemcpyDefault, stream),
            "hipMemcpy2DAsync");
}

// Page-locked memory and the device's address of it. Coherent: the host sees what a kernel writes while the
// kernel still runs. Never freed.
inline void* allocate_mapped_host(size_t nbytes, void** device_address, const char* what) {
  void* memory = nullptr;
  check_hip(hipHostMalloc(&memory, nbytes, hipHostMallocMapped | hipHostMallocPortable | hipHostMallocCoherent),
            what);
  const hipError_t mapped = hipHostGetDevicePointer(device_address, memory, 0);
  if (mapped != hipSuccess)
    (void)hipHostFree(memory);
  check_hip(mapped, "hipHostGetDevicePointer");
  return memory;
}
// Device memory full of zeros when the stream gets there. Never freed.
inline void* allocate_zeroed(size_t nbytes, GpuStream stream, const char* what) {
  void* memory = nullptr;
  check_hip(hipMalloc(&memory, nbytes), what);
  check_hip(hipMemsetAsync(memory, 0, nbytes, stream), "hipMemsetAsync");
  return memory;
}

#if defined(__HIPCC__)
// --- Device --------------------------------------------------------------------------------------

// A call that is no kernel's own code needs a stack in memory on these GPUs; registers there are.
#define HICACHE_RARE inline __attribute__((always_inline))

#define HICACHE_GLOBAL __attribute__((address_space(1)))

// An address out of a struct or a table may be of any memory, for all the compiler knows, and is then accessed
// by `flat` instructions. This one is global memory.
template <typename T>
__device__ inline HICACHE_GLOBAL T* as_global(T* address) {
  return (HICACHE_GLOBAL T*)address;
}

// A kernel's only parameter, where the launch has put it. The named one has no address there: where one is
// chosen at run time, all of the parameter is first copied to a stack.
#ifndef HICACHE_PARAMETER
#define HICACHE_PARAMETER(name) (*(const decltype(name)*)__builtin_amdgcn_kernarg_segment_ptr())
#endif

// A vector of words; a compiler that has no such vectors may bring its own.
#ifndef HICACHE_WORDS
#define HICACHE_WORDS(count) uint32_t __attribute__((vector_size(4 * count)))
#endif

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  typedef HICACHE_WORDS(4) Type;
};
template <>
struct VectorOf<8> {
  typedef HICACHE_WORDS(2) Type;
};
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<2> {
  using Type = uint16_t;
};
template <>
struct VectorOf<1> {
  using Type = uint8_t;
};
template <int kBytes>
using Vector = typename VectorOf<kBytes>::Type;

// Rows are read once and written once: keep them from displacing the model's working set.
template <int kBytes>
__device__ inline Vector<kBytes> load_vector(const char* address) {
  return __builtin_nontemporal_load((const HICACHE_GLOBAL Vector<kBytes>*)address);
}
template <int kBytes>
__device__ inline void store_vector(char* address, Vector<kBytes> value) {
  __builtin_nontemporal_store(value, (HICACHE_GLOBAL Vector<kBytes>*)address);
}

__device__ inline uint32_t thread_index() {
  return __builtin_amdgcn_workitem_id_x();
}
__device__ inline uint32_t block_index() {
  return __builtin_amdgcn_workgroup_id_x();
}
// The first word of the implicit arguments, from code object version 5 on.
__device__ inline uint32_t grid_blocks() {
  return *(const __attribute__((address_space(4))) uint32_t*)__builtin_amdgcn_implicitarg_ptr();
}

__device__ inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}
__device__ inline void __threadfence() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
}
__device__ inline void __threadfence_system() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
}
__device__ inline uint32_t atomicCAS(HICACHE_GLOBAL uint32_t* address, uint32_t expected, uint32_t desired) {
  __hip_atomic_compare_exchange_strong(address, &expected, desired, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}
__device__ inline uint32_t atomicExch(HICACHE_GLOBAL uint32_t* address, uint32_t value) {
  return __hip_atomic_exchange(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Of the lanes of a wavefront that call this together, the one with the least value.
__device__ inline bool has_least_of_lockstep(int64_t value) {
  int64_t least = INT64_MAX;
  uint32_t least_lane = 0;
  for (uint64_t lanes = __builtin_amdgcn_read_exec(); lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctzll(lanes);
    const auto low = static_cast<uint32_t>(__builtin_amdgcn_readlane(static_cast<int>(value), lane));
    const int64_t high = __builtin_amdgcn_readlane(static_cast<int>(value >> 32), lane);
    const int64_t other = high << 32 | low;
    if (other < least) {
      least = other;
      least_lane = lane;
    }
  }
  return least_lane == __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}

// HIP has no launches that overlap on one stream.
__device__ inline void let_next_launch_start() {}
__device__ inline void wait_for_previous_launch() {}
#endif

}  // namespace hicache
