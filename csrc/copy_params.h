// What one launch of the copy kernel is told: plain structs, filled by copy_launches.h, read by
// copy_rows.cuh.
#pragma once

#include <cstdint>

#include "error_record.cuh"

namespace hicache {

constexpr int kCopyThreads = 1024;
constexpr int kUnitsPerThread = 4;
constexpr int kMaxDims = 6;            // entries, a table of planes, and the loops that fit
constexpr int kMaxPlanes = 128;        // base addresses in one launch's parameters
constexpr int kMaxInlineEntries = 64;  // index pairs in the parameters, for small work

// Division by an invariant for n < 2^31: q = (mulhi(n, magic) + n) >> shift.
struct Divisor {
  uint32_t size = 1;
  uint32_t magic = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : size(divisor) {
    while ((uint64_t{1} << shift) < divisor)
      ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
};

struct CopyDim {
  Divisor size;
  int64_t dst_stride_bytes;
  int64_t src_stride_bytes;
};

struct DeviceIndices {
  const void* data;
  int64_t stride;  // elements
  int32_t is_int64;
};

struct CopyParams {
  // Indices: entry e of this launch is position first_entry + e.
  DeviceIndices dst_indices;
  DeviceIndices src_indices;
  DeviceIndices count;  // data is null without one
  int64_t first_entry;
  int64_t num_entries;  // of the whole call
  int64_t dst_slots;
  int64_t src_slots;
  ErrorSink errors;

  // The box. dims[entry_dim] are entries, with the slots' strides; dims[plane_dim] index `planes`.
  uint32_t num_units;
  Divisor units_per_chunk;
  uint32_t tail_bytes;  // bytes of a chunk's last unit; 0 when it is a whole vector
  int32_t num_dims;
  int32_t entry_dim;
  int32_t plane_dim;  // -1: all chunks start from planes[0]
  CopyDim dims[kMaxDims];

  int32_t num_inline_entries;                    // > 0: the indices are below, not in memory
  int32_t inline_indices[2][kMaxInlineEntries];  // dst, src
  struct {
    char* dst;
    const char* src;
  } planes[kMaxPlanes];
};
static_assert(sizeof(CopyParams) <= 4096, "kernel parameters of every CUDA and ROCm version hold 4 KiB");

}  // namespace hicache
