// What the kernel that makes pages of tokens is told.
#pragma once

#include <algorithm>
#include <cstdint>

#include "copy_params.h"

namespace hicache {

// A page whose tokens are no whole, aligned page. Out of range for any pool, so transfer_kv records it.
constexpr int64_t kBadPage = int64_t{1} << 62;

struct PageParams {
  DeviceIndices tokens;
  int64_t page_size;
  uint64_t reciprocal;  // of page_size, as a fraction of 2^64, rounded down
  int64_t num_pages;
  int64_t* pages;
};

constexpr int kPageThreads = 256;
inline unsigned page_blocks(int64_t num_pages) {
  return static_cast<unsigned>(std::min<int64_t>((num_pages + kPageThreads - 1) / kPageThreads, 1024));
}

}  // namespace hicache
