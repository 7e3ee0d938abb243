// The device body of GPU kernels (HIP has its own version of it in hip/): copies the chunks of a box of
// (planes, loops, entries).
//
//   unit u = one vector of one chunk
//   u -> (vector, dimension 0, dimension 1, ...)     fastest first, in the host pool's address order
//
// A block takes tiles of kThreads * kUnitsPerThread consecutive units, so that neighbouring threads touch
// neighbouring bytes and neighbouring blocks neighbouring tiles. A thread has kUnitsPerThread loads
// in flight before its first store: the link's latency is what there is to hide.
//
// The including file supplies, from its vendor's runtime.h: Vector<kBytes>, load_vector, store_vector,
// as_global, has_least_of_lockstep, let_next_launch_start, wait_for_previous_launch.
#pragma once

#include <cstdint>

#include "copy_params.h"
#include "record_error.cuh"

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

// The slots that entry `position` names, unchecked: -1 where nothing is to be read.
__device__ inline int64_t read_dst_slot(const CopyParams& params, int64_t position) {
  return params.num_inline_entries > 0 ? params.inline_indices[0][position]
                                       : read_index(params.dst_indices, position);
}
__device__ inline int64_t read_src_slot(const CopyParams& params, int64_t position) {
  return params.num_inline_entries > 0 ? params.inline_indices[1][position]
                                       : read_index(params.src_indices, position);
}

// A slot number in the width that the pools need: values that do not fit become kBadSlot.
template <typename Slot>
__device__ inline Slot narrow_slot(int64_t slot) {
  constexpr Slot kBadSlot = -2;
  const Slot narrow = static_cast<Slot>(slot);
  return narrow == slot ? narrow : kBadSlot;
}

// False for padding, and for indices that must not be followed (`is_bad`).
__device__ inline bool check_slots(const CopyParams& params, int64_t dst_slot, int64_t src_slot, bool& is_bad) {
  is_bad = dst_slot < -1 || dst_slot >= params.dst_slots || src_slot < -1 || src_slot >= params.src_slots;
  return dst_slot >= 0 && src_slot >= 0 && !is_bad;
}

// Not inlined: it is rare, and the copy loop has no registers to spare for it.
static __device__ __noinline__ void report_bad_entry(const CopyParams& params, int64_t position) {
  const int64_t dst_slot = read_dst_slot(params, position);
  const int64_t src_slot = read_src_slot(params, position);
  const bool is_dst = dst_slot < -1 || dst_slot >= params.dst_slots;
  record_error(params.errors, is_dst ? BadValue::kDstIndex : BadValue::kSrcIndex, position,
               is_dst ? dst_slot : src_slot, is_dst ? params.dst_slots : params.src_slots);
}

// Where a unit lies, apart from its slots.
struct UnitPlace {
  char* dst;
  const char* src;
  uint32_t entry;
  bool is_tail;
  bool reports;  // true for one unit of each entry in the whole box
};

template <int kVectorBytes>
__device__ inline UnitPlace locate(const CopyParams& params, uint32_t u) {
  uint32_t rest = divide(u, params.units_per_chunk);
  const uint32_t vector = u - rest * params.units_per_chunk.size;
  int64_t dst_offset = static_cast<int64_t>(vector) * kVectorBytes;
  int64_t src_offset = dst_offset;
  uint32_t plane = 0;
  UnitPlace place;
  place.entry = 0;
  place.is_tail = params.tail_bytes != 0 && vector == params.units_per_chunk.size - 1;
  place.reports = vector == 0;
  for (int k = 0; k < params.num_dims; ++k) {
    const CopyDim& dim = params.dims[k];
    const uint32_t next = divide(rest, dim.size);
    const uint32_t i = rest - next * dim.size.size;
    rest = next;
    if (k == params.entry_dim) {
      place.entry = i;
      continue;
    }
    place.reports = place.reports && i == 0;
    if (k == params.plane_dim) {
      plane = i;
    } else {
      dst_offset += i * dim.dst_stride_bytes;
      src_offset += i * dim.src_stride_bytes;
    }
  }
  place.dst = params.planes[plane].dst + dst_offset;
  place.src = params.planes[plane].src + src_offset;
  return place;
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

// Four passes over a thread's units, so that each kind of access is in flight for all of them at once: their
// places, their indices, their loads, their stores. `Slot` is int32_t where both pools' slot numbers fit: the
// loop is short of registers.
template <int kVectorBytes, typename Slot>
__device__ inline void copy_rows(const CopyParams& params) {
  const int64_t count = read_count(params);
  const int64_t dst_slot_stride = params.dims[params.entry_dim].dst_stride_bytes;
  const int64_t src_slot_stride = params.dims[params.entry_dim].src_stride_bytes;
  constexpr uint32_t kTileUnits = kCopyThreads * kUnitsPerThread;
  for (uint32_t tile = blockIdx.x * kTileUnits; tile < params.num_units; tile += gridDim.x * kTileUnits) {
    if (tile + gridDim.x * kTileUnits >= params.num_units)
      let_next_launch_start();
    UnitPlace place[kUnitsPerThread];
    Slot dst_slot[kUnitsPerThread], src_slot[kUnitsPerThread];
    Vector<kVectorBytes> data[kUnitsPerThread];
#pragma unroll
    for (int k = 0; k < kUnitsPerThread; ++k) {
      const uint32_t u = tile + k * kCopyThreads + threadIdx.x;
      place[k] = locate<kVectorBytes>(params, u < params.num_units ? u : 0);
      const int64_t position = params.first_entry + place[k].entry;
      const bool moves = u < params.num_units && position < count;
      dst_slot[k] = moves ? narrow_slot<Slot>(read_dst_slot(params, position)) : -1;
      src_slot[k] = moves ? narrow_slot<Slot>(read_src_slot(params, position)) : -1;
    }
#pragma unroll
    for (int k = 0; k < kUnitsPerThread; ++k) {
      bool is_bad;
      if (!check_slots(params, dst_slot[k], src_slot[k], is_bad)) {
        if (is_bad && place[k].reports)
          report_bad_entry(params, params.first_entry + place[k].entry);
        place[k].dst = nullptr;
        continue;
      }
      place[k].dst += dst_slot[k] * dst_slot_stride;
      place[k].src += src_slot[k] * src_slot_stride;
      if (!place[k].is_tail)
        data[k] = load_vector<kVectorBytes>(place[k].src);
    }
#pragma unroll
    for (int k = 0; k < kUnitsPerThread; ++k) {
      if (place[k].dst == nullptr)
        continue;
      if (place[k].is_tail)
        copy_tail<kVectorBytes / 2>(place[k].dst, place[k].src, params.tail_bytes);
      else
        store_vector<kVectorBytes>(place[k].dst, data[k]);
    }
  }
  report_clamped_count(params);
  wait_for_previous_launch();
}

}  // namespace hicache
