#pragma once

#include "../transfer_kv.h"

namespace hicache {

// The ops of these names, for library.cpp.
void transfer_kv_hip(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                     const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                     const std::string& method, int64_t max_blocks);
std::string explain_hip(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                        const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                        const std::optional<Tensor>& count, const std::string& method, int64_t max_blocks);

}  // namespace hicache
