#include "runtime.h"
// After runtime.h, whose device words it uses.
#include "copy_rows.cuh"
#include "../page_indices.cuh"
#include "copy_kernels.h"

#include <algorithm>
#include <limits>

namespace hicache {

__device__ ErrorLock error_lock;  // one in each device's copy of this module

template <int kVectorBytes, int kStripes, typename Slot>
__global__ __attribute__((amdgpu_flat_work_group_size(kCopyThreads, kCopyThreads))) void copy_kernel(
    const CopyParams params) {
  copy_rows<kVectorBytes, kStripes, Slot>(HICACHE_PARAMETER(params));
}

__global__ __attribute__((amdgpu_flat_work_group_size(kSelectThreads, kSelectThreads))) void select_kernel(
    const SelectParams params) {
  const uint32_t step = grid_blocks() * kSelectThreads;
  for (uint32_t i = block_index() * kSelectThreads + thread_index(); i < params.size; i += step) {
    const int64_t slot = read_index(params.device_slots, params.first_entry + i);
    as_global(params.out)[i] =
        slot < 0 || slot >= params.num_device_slots ? as_global(params.host_slots)[i] : -1;
  }
}

__global__ __attribute__((amdgpu_flat_work_group_size(kPageThreads, kPageThreads))) void page_kernel(
    const PageParams params) {
  write_pages(HICACHE_PARAMETER(params), block_index() * kPageThreads + thread_index(),
              grid_blocks() * kPageThreads);
}

namespace {

hipError_t start(void (*kernel)(CopyParams), unsigned blocks, const CopyParams& params, hipStream_t stream) {
  void* arguments[] = {const_cast<CopyParams*>(&params)};
  return hipLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(kCopyThreads), arguments, 0,
                         stream);
}

}  // namespace

hipError_t start_copy(const CopyParams& params, int vector_bytes, int stripes, unsigned blocks,
                      hipStream_t stream) {
  const bool is_narrow = std::max(params.dst_slots, params.src_slots) <= std::numeric_limits<int32_t>::max();
  const auto choose = [&](auto narrow, auto wide) {
    return start(is_narrow ? narrow : wide, blocks, params, stream);
  };
  if (stripes == kStripes)
    return choose(copy_kernel<kStripedVectorBytes, kStripes, int32_t>,
                  copy_kernel<kStripedVectorBytes, kStripes, int64_t>);
  switch (vector_bytes) {
    case 16:
      return choose(copy_kernel<16, 1, int32_t>, copy_kernel<16, 1, int64_t>);
    case 8:
      return choose(copy_kernel<8, 1, int32_t>, copy_kernel<8, 1, int64_t>);
    case 4:
      return choose(copy_kernel<4, 1, int32_t>, copy_kernel<4, 1, int64_t>);
    case 2:
      return choose(copy_kernel<2, 1, int32_t>, copy_kernel<2, 1, int64_t>);
    default:
      return choose(copy_kernel<1, 1, int32_t>, copy_kernel<1, 1, int64_t>);
  }
}

hipError_t start_select(const SelectParams& params, unsigned blocks, hipStream_t stream) {
  void* arguments[] = {const_cast<SelectParams*>(&params)};
  return hipLaunchKernel(reinterpret_cast<const void*>(&select_kernel), dim3(blocks), dim3(kSelectThreads),
                         arguments, 0, stream);
}

hipError_t start_pages(const PageParams& params, hipStream_t stream) {
  void* arguments[] = {const_cast<PageParams*>(&params)};
  return hipLaunchKernel(reinterpret_cast<const void*>(&page_kernel), dim3(page_blocks(params.num_pages)),
                         dim3(kPageThreads), arguments, 0, stream);
}

hipError_t find_error_lock(ErrorLock** lock) {
  return hipGetSymbolAddress(reinterpret_cast<void**>(lock), error_lock);
}

}  // namespace hicache
