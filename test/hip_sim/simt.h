// Lets a host compiler, or nvcc, build csrc/hip/copy_kernels.hip: what clang has built in for AMD GPUs, as
// plain code. Given to the compiler with -include.
#pragma once

#define __HIPCC__ 1
#include <hip/hip_runtime_api.h>

#include <cstdint>

#ifdef __CUDACC__
#define HIP_SIM_DEVICE __device__ inline
#else
#define HIP_SIM_DEVICE inline
#endif

#define HICACHE_PARAMETER(name) name

#ifdef __CUDACC__
HIP_SIM_DEVICE uint32_t __builtin_amdgcn_workitem_id_x() {
  return threadIdx.x;
}
HIP_SIM_DEVICE uint32_t __builtin_amdgcn_workgroup_id_x() {
  return blockIdx.x;
}
#define HICACHE_WORDS(count) uint##count
#define __builtin_ctzll(value) (__ffsll(value) - 1)
// The implicit arguments begin with the grid's size; gridDim itself has no address.
struct HipSimGrid {
  uint32_t blocks;
  __device__ operator const uint32_t*() const {
    return &blocks;
  }
};
#define __builtin_amdgcn_implicitarg_ptr() \
  HipSimGrid {                             \
    gridDim.x                              \
  }
#define __builtin_nontemporal_load(address) __ldcs(address)
#define __builtin_nontemporal_store(value, address) __stcs(address, value)
#define __builtin_amdgcn_fence(order, scope) ::__threadfence_system()
#define __hip_atomic_compare_exchange_strong(address, expected, desired, success, failure, scope) \
  (*(expected) = ::atomicCAS(address, *(expected), desired))
#define __hip_atomic_exchange(address, value, order, scope) ::atomicExch(address, value)
#else
// Threads run one after another.
struct HipSimThread {
  uint32_t thread, block, blocks;
};
inline thread_local HipSimThread hip_sim_thread;

HIP_SIM_DEVICE uint32_t __builtin_amdgcn_workitem_id_x() {
  return hip_sim_thread.thread;
}
HIP_SIM_DEVICE uint32_t __builtin_amdgcn_workgroup_id_x() {
  return hip_sim_thread.block;
}
#define __builtin_amdgcn_implicitarg_ptr() (&hip_sim_thread.blocks)
#define __builtin_nontemporal_load(address) (*(address))
#define __builtin_nontemporal_store(value, address) (*(address) = (value))
#define __builtin_amdgcn_fence(order, scope) __atomic_thread_fence(order)
#define __hip_atomic_compare_exchange_strong(address, expected, desired, success, failure, scope) \
  __atomic_compare_exchange_n(address, expected, desired, false, success, failure)
#define __hip_atomic_exchange(address, value, order, scope) __atomic_exchange_n(address, value, order)
#endif
#define __HIP_MEMORY_SCOPE_AGENT 4
#ifdef __CUDACC__
// A warp's lanes that are here together are a wavefront's active ones.
#define __builtin_amdgcn_read_exec() \
  uint64_t {                         \
    __activemask()                   \
  }
#define __builtin_amdgcn_readlane(value, lane) __shfl_sync(__activemask(), value, lane)
#define __builtin_amdgcn_mbcnt_lo(mask, value) (threadIdx.x % 32)
#define __builtin_amdgcn_mbcnt_hi(mask, value) (value)
#else
// Each thread is a wavefront of its own.
#define __builtin_amdgcn_read_exec() uint64_t{1}
#define __builtin_amdgcn_readlane(value, lane) ((void)(lane), (value))
#define __builtin_amdgcn_mbcnt_lo(mask, value) (value)
#define __builtin_amdgcn_mbcnt_hi(mask, value) (value)
#endif
