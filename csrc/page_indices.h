// Token indices as page indices. Host code that CUDA and HIP share; page_indices.cuh is the device's.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <stdexcept>

#include "page_params.h"
#include "transfer_kv.h"

namespace hicache {

// One-dimensional, int32 or int64, a whole number of pages.
inline bool are_pages(const Tensor& tokens, int64_t page_size) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tokens.get(), &dtype));
  return page_size >= 1 && tokens.dim() == 1 && tokens.numel() % page_size == 0 &&
         (dtype == aoti_torch_dtype_int64() || dtype == aoti_torch_dtype_int32());
}

// An int64 tensor beside the tokens, out of torch's own allocator.
inline Tensor empty_pages(const Tensor& tokens, int64_t page_size) {
  const int64_t num_pages = tokens.numel() / page_size, stride = 1;
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tokens.get(), &type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &num_pages, &stride, aoti_torch_dtype_int64(), type,
                                                  tokens.get_device_index(), &handle));
  return Tensor(handle);
}

inline PageParams page_params(const Tensor& tokens, int64_t page_size, Tensor& pages) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tokens.get(), &dtype));
  const DeviceIndices indices{tokens.const_data_ptr(), tokens.stride(0), dtype == aoti_torch_dtype_int64()};
  return {indices, page_size, UINT64_MAX / static_cast<uint64_t>(page_size), pages.numel(),
          static_cast<int64_t*>(pages.mutable_data_ptr())};
}

// The op: `start(params)` launches the kernel on the device's current stream.
template <typename Start>
Tensor page_indices_by(const Tensor& tokens, int64_t page_size, const Start& start) {
  if (!are_pages(tokens, page_size))
    throw std::invalid_argument("[page_indices] tokens must be 1-D, int32 or int64, and whole pages.");
  Tensor pages = empty_pages(tokens, page_size);
  if (pages.numel() > 0)
    start(page_params(tokens, page_size, pages));
  return pages;
}

}  // namespace hicache
