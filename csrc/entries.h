// The entries of a call in the form that the copy kernel reads, on the device. Host code that CUDA and HIP
// share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy_params.h"
#include "transfer_kv.h"

namespace hicache {

struct Entries {
  DeviceIndices dst{};
  DeviceIndices src{};
  DeviceIndices count{};
  int64_t num_entries = 0;
  std::vector<int32_t> inline_dst, inline_src;  // few entries travel in the kernel's parameters
  std::vector<Tensor> scratch;  // what the pointers above point into; torch frees it in stream order
};

// Parameters of all launches of a call, but for the box.
inline CopyParams copy_params(const Entries& entries, int64_t dst_slots, int64_t src_slots,
                              const ErrorSink& errors) {
  CopyParams params;
  params.dst_indices = entries.dst;
  params.src_indices = entries.src;
  params.count = entries.count;
  params.num_entries = entries.num_entries;
  params.dst_slots = dst_slots;
  params.src_slots = src_slots;
  params.errors = errors;
  params.num_inline_entries = static_cast<int32_t>(entries.inline_dst.size());
  std::copy(entries.inline_dst.begin(), entries.inline_dst.end(), params.inline_indices[0]);
  std::copy(entries.inline_src.begin(), entries.inline_src.end(), params.inline_indices[1]);
  return params;
}

}  // namespace hicache
