// The device body that CUDA and HIP share: copies the chunks of a box of (planes, loops, entries).
//
//   unit u = one vector of one chunk
//   u -> (vector, dimension 0, dimension 1, ...)     fastest first, in the host pool's address order
//
// A block takes tiles of kThreads * kUnitsPerThread consecutive units, so that neighbouring threads touch
// neighbouring bytes and neighbouring blocks neighbouring tiles. A thread has kUnitsPerThread loads
// in flight before its first store: the link's latency is what there is to hide.
//
// The including file supplies, from its vendor's runtime.h: Vector<kBytes>, load_vector, store_vector.
#pragma once

#include <cstdint>

#include "copy_params.h"
#include "error_record.cuh"

namespace hicache {

__device__ inline uint32_t divide(uint32_t n, const Divisor& d) {
  return (__umulhi(n, d.magic) + n) >> d.shift;
}

__device__ inline int64_t read_index(const DeviceIndices& indices, int64_t position) {
  return indices.is_int64 ? static_cast<const int64_t*>(indices.data)[position * indices.stride]
                          : static_cast<const int32_t*>(indices.data)[position * indices.stride];
}

// Entries that move: `count` clamped to the call's entries.
__device__ inline int64_t read_count(const CopyParams& params) {
  if (params.count.data == nullptr)
    return params.num_entries;
  const int64_t count = read_index(params.count, 0);
  return count < 0 ? 0 : (count > params.num_entries ? params.num_entries : count);
}

// One thread of the call's first launch reports a count that was clamped.
__device__ inline void report_clamped_count(const CopyParams& params) {
  if (params.count.data == nullptr || params.first_entry != 0 || blockIdx.x != 0 || threadIdx.x != 0)
    return;
  const int64_t given = read_index(params.count, 0);
  if (given < 0 || given > params.num_entries)
    record_error(params.errors, BadValue::kCount, 0, given, params.num_entries);
}

// The slots of one entry; false for padding and for indices that must not be followed.
__device__ inline bool read_slots(const CopyParams& params, uint32_t entry, int64_t count, bool reports,
                                  int64_t& dst_slot, int64_t& src_slot) {
  const int64_t position = params.first_entry + entry;
  if (position >= count)
    return false;
  if (params.num_inline_entries > 0) {
    dst_slot = params.inline_indices[0][position];
    src_slot = params.inline_indices[1][position];
  } else {
    dst_slot = read_index(params.dst_indices, position);
    src_slot = read_index(params.src_indices, position);
  }
  const bool is_dst_bad = dst_slot < -1 || dst_slot >= params.dst_slots;
  const bool is_src_bad = src_slot < -1 || src_slot >= params.src_slots;
  if (reports && is_dst_bad)
    record_error(params.errors, BadValue::kDstIndex, position, dst_slot, params.dst_slots);
  else if (reports && is_src_bad)
    record_error(params.errors, BadValue::kSrcIndex, position, src_slot, params.src_slots);
  return dst_slot >= 0 && src_slot >= 0 && !is_dst_bad && !is_src_bad;
}

// Where unit u reads and writes; false when it moves nothing.
template <int kVectorBytes>
__device__ inline bool locate(const CopyParams& params, uint32_t u, int64_t count, char*& dst, const char*& src,
                              bool& is_tail) {
  uint32_t rest = divide(u, params.units_per_chunk);
  const uint32_t vector = u - rest * params.units_per_chunk.size;
  is_tail = params.tail_bytes != 0 && vector == params.units_per_chunk.size - 1;
  int64_t dst_offset = static_cast<int64_t>(vector) * kVectorBytes;
  int64_t src_offset = dst_offset;
  uint32_t entry = 0, plane = 0;
  bool reports = vector == 0;  // one unit of an entry's whole box
  for (int k = 0; k < params.num_dims; ++k) {
    const CopyDim& dim = params.dims[k];
    const uint32_t next = divide(rest, dim.size);
    const uint32_t i = rest - next * dim.size.size;
    rest = next;
    if (k == params.entry_dim) {
      entry = i;
      continue;
    }
    reports = reports && i == 0;
    if (k == params.plane_dim) {
      plane = i;
    } else {
      dst_offset += i * dim.dst_stride_bytes;
      src_offset += i * dim.src_stride_bytes;
    }
  }
  int64_t dst_slot, src_slot;
  if (!read_slots(params, entry, count, reports, dst_slot, src_slot))
    return false;
  const CopyDim& slots = params.dims[params.entry_dim];
  dst = params.planes[plane].dst + dst_offset + dst_slot * slots.dst_stride_bytes;
  src = params.planes[plane].src + src_offset + src_slot * slots.src_stride_bytes;
  return true;
}

// The bytes of a chunk behind its last whole vector: powers of two, all loads before the first store.
template <int kBytes>
__device__ inline void copy_tail(char* dst, const char* src, uint32_t bytes) {
  if constexpr (kBytes >= 1) {
    const bool has_piece = (bytes & kBytes) != 0;
    const int step = has_piece ? kBytes : 0;
    Vector<kBytes> value{};
    if (has_piece)
      value = load_vector<kBytes>(src);
    copy_tail<kBytes / 2>(dst + step, src + step, bytes);
    if (has_piece)
      store_vector<kBytes>(dst, value);
  }
}

template <int kVectorBytes>
__device__ inline void copy_rows(const CopyParams& params) {
  const int64_t count = read_count(params);
  constexpr uint32_t kTileUnits = kCopyThreads * kUnitsPerThread;
  for (uint32_t tile = blockIdx.x * kTileUnits; tile < params.num_units; tile += gridDim.x * kTileUnits) {
    char* dst[kUnitsPerThread];
    Vector<kVectorBytes> data[kUnitsPerThread];
#pragma unroll
    for (int k = 0; k < kUnitsPerThread; ++k) {
      const uint32_t u = tile + k * kCopyThreads + threadIdx.x;
      const char* src;
      bool is_tail;
      dst[k] = nullptr;
      if (u >= params.num_units || !locate<kVectorBytes>(params, u, count, dst[k], src, is_tail))
        continue;
      if (!is_tail) {
        data[k] = load_vector<kVectorBytes>(src);
        continue;
      }
      copy_tail<kVectorBytes / 2>(dst[k], src, params.tail_bytes);
      dst[k] = nullptr;
    }
#pragma unroll
    for (int k = 0; k < kUnitsPerThread; ++k)
      if (dst[k] != nullptr)
        store_vector<kVectorBytes>(dst[k], data[k]);
  }
  report_clamped_count(params);
}

}  // namespace hicache
