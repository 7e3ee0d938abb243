// Calls of the integrations, whose tensors are not yet the planes that transfer_kv takes. Python works the
// planes of such a call out once; from then on one op looks them up and runs it, since each question that
// Python asks a tensor costs 0.1 us (2-core x86, 2026-11-30).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transfer_kv.h"

namespace hicache {

using PagesOf = Tensor(const Tensor& tokens, int64_t page_size);  // for tokens on a device: page_indices
using Transfer = void(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                      const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                      const std::string& method, int64_t max_blocks);

// Known by `form`, a number of Python's for all that is no tensor, and by address, device, dtype, sizes and
// strides of each tensor. The planes own no memory and serve a call only while its tensors describe them.
void keep_call(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
               const Tensor& src_indices, int64_t form, const std::vector<Tensor>& dst_planes,
               const std::vector<Tensor>& src_planes, int64_t slot_dim, int64_t page_size);

bool run_known_call(Transfer* transfer, PagesOf* device_pages, const std::vector<Tensor>& dst,
                    const std::vector<Tensor>& src, const Tensor& dst_indices, const Tensor& src_indices,
                    int64_t form, int64_t max_blocks);

// Each backend's op: false, and nothing has happened, where the call is not known or its tokens are no pages.
template <Transfer transfer, PagesOf* device_pages = nullptr>
bool transfer_known(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                    const Tensor& src_indices, int64_t form, int64_t max_blocks) {
  return run_known_call(transfer, device_pages, dst, src, dst_indices, src_indices, form, max_blocks);
}

}  // namespace hicache
