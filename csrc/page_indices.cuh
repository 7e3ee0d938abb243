// Token indices as page indices, on a GPU: see page_indices in ops.cpp. The including file supplies
// read_index.
#pragma once

#include <cstdint>

#include "page_params.h"

namespace hicache {

// Page `at` of the tokens: -1 for a page of -1, kBadPage for tokens that are no whole page.
__device__ inline int64_t page_of(const PageParams& params, int64_t at) {
  const int64_t begin = at * params.page_size;
  const int64_t first = read_index(params.tokens, begin);
  const auto token = static_cast<uint64_t>(first), page_size = static_cast<uint64_t>(params.page_size);
  const bool is_padding = first == -1;
  auto page = static_cast<uint64_t>(static_cast<unsigned __int128>(token) * params.reciprocal >> 64);
  uint64_t rest = token - page * page_size;
  if (rest >= page_size) {  // the reciprocal is rounded, and the quotient short by 1 at most
    rest -= page_size;
    ++page;
  }
  bool is_bad = !is_padding && (first < 0 || rest != 0);
  for (int64_t k = 1; k < params.page_size; ++k) {
    const uint64_t expected = is_padding ? token : token + static_cast<uint64_t>(k);
    is_bad |= static_cast<uint64_t>(read_index(params.tokens, begin + k)) != expected;
  }
  return is_bad ? kBadPage : is_padding ? -1 : static_cast<int64_t>(page);
}

__device__ inline void write_pages(const PageParams& params, uint32_t first, uint32_t step) {
  for (int64_t at = first; at < params.num_pages; at += step)
    params.pages[at] = page_of(params, at);
}

}  // namespace hicache
