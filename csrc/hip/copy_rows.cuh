// The device body on AMD GPUs: copies the chunks of a box of (planes, loops, entries). It differs from
// ../copy_rows.cuh in what its vendor's runtime.h names, in that a thread reports its first bad entry once,
// behind the loop (calls are dear here), and in that nothing waits for memory before all of a thread's indices
// are on their way.
//
//   unit u = kStripes vectors of one chunk, a kStripes-th of the chunk apart
//   u -> (vector, dimension 0, dimension 1, ...)     fastest first, in the host pool's address order
//
// A block takes tiles of kThreads * kUnits consecutive units, so that neighbouring threads touch
// neighbouring bytes and neighbouring blocks neighbouring tiles. A thread has kUnits * kStripes loads in
// flight, always kUnitsPerThread, before its first store: the link's latency is what there is to hide. To
// find where a unit lies takes most of the instructions, so wide chunks have stripes (stripes_of).
//
// The including file supplies, from its vendor's runtime.h: Vector<kBytes>, load_vector, store_vector,
// as_global, has_least_of_lockstep, thread_index, block_index, grid_blocks, HICACHE_GLOBAL, HICACHE_RARE,
// let_next_launch_start, wait_for_previous_launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../copy_params.h"
#include "../record_error.cuh"

namespace hicache {

__device__ inline uint32_t divide(uint32_t n, const Divisor& d) {
  return (__umulhi(n, d.magic) + n) >> d.shift;
}

__device__ inline int64_t read_index(const DeviceIndices& indices, int64_t position) {
  return indices.is_int64 ? as_global(static_cast<const int64_t*>(indices.data))[position * indices.stride]
                          : as_global(static_cast<const int32_t*>(indices.data))[position * indices.stride];
}

constexpr uint32_t kNoEntry = ~uint32_t{0};

// Entries that move of this launch: `count` clamped to the call's entries.
__device__ inline uint32_t read_count(const CopyParams& params) {
  const int64_t given = params.count.data == nullptr ? params.num_entries : read_index(params.count, 0);
  const int64_t count = given < 0 ? 0 : given > params.num_entries ? params.num_entries : given;
  const int64_t left = count - params.first_entry;
  return left <= 0 ? 0 : left > kNoEntry ? kNoEntry : static_cast<uint32_t>(left);
}

// One thread of the call's first launch reports a count that was clamped.
__device__ inline void report_clamped_count(const CopyParams& params) {
  if (params.count.data == nullptr || params.first_entry != 0 || block_index() != 0 || thread_index() != 0)
    return;
  const int64_t given = read_index(params.count, 0);
  if (given < 0 || given > params.num_entries)
    record_error(params.errors, BadValue::kCount, 0, given, params.num_entries);
}

// The slots of one side, from the launch's first entry on.
struct Slots {
  const char* data;
  int64_t stride_bytes;
  bool are_int64;
};

__device__ inline Slots find_slots(const CopyParams& params, const DeviceIndices& indices, int side) {
  const bool are_inline = params.num_inline_entries > 0;
  const bool are_int64 = !are_inline && indices.is_int64;
  const int64_t stride_bytes = (are_inline ? 1 : indices.stride) * (are_int64 ? 8 : 4);
  const void* data = are_inline ? params.inline_indices[side] : indices.data;
  return {static_cast<const char*>(data) + params.first_entry * stride_bytes, stride_bytes, are_int64};
}

// A slot as memory holds it; int32_t ones have no `high`.
struct StoredSlot {
  int32_t low, high;
};

// Unchecked. Nothing here looks at the value, so that nothing waits for it.
__device__ inline StoredSlot read_slot(const Slots& slots, uint32_t entry) {
  StoredSlot slot;
  const auto* at = as_global(slots.data + entry * slots.stride_bytes);
  if (slots.are_int64) {
    const int64_t value = *(const HICACHE_GLOBAL int64_t*)at;
    slot.low = static_cast<int32_t>(value);
    slot.high = static_cast<int32_t>(value >> 32);
  } else {
    slot.low = *(const HICACHE_GLOBAL int32_t*)at;
  }
  return slot;
}

// A slot number in the width that the pools need: values that do not fit become kBadSlot.
template <typename Slot>
__device__ inline Slot to_slot(const Slots& slots, const StoredSlot& slot) {
  constexpr Slot kBadSlot = -2;
  const int32_t high = slots.are_int64 ? slot.high : slot.low >> 31;
  if constexpr (sizeof(Slot) == 8)
    return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(slot.low);
  else
    return high == slot.low >> 31 ? slot.low : kBadSlot;
}

// False for padding, and for indices that must not be followed (`is_bad`).
template <typename Slot>
__device__ inline bool check_slots(const CopyParams& params, Slot dst_slot, Slot src_slot, bool& is_bad) {
  is_bad = dst_slot < -1 || dst_slot >= static_cast<Slot>(params.dst_slots) || src_slot < -1 ||
           src_slot >= static_cast<Slot>(params.src_slots);
  return dst_slot >= 0 && src_slot >= 0 && !is_bad;
}

// Rare: where a vendor's calls are cheap it is not inlined, since the copy loop has no registers to spare.
static __device__ HICACHE_RARE void report_bad_entry(const CopyParams& params, const Slots& dst,
                                                     const Slots& src, uint32_t entry) {
  const auto dst_slot = to_slot<int64_t>(dst, read_slot(dst, entry));
  const auto src_slot = to_slot<int64_t>(src, read_slot(src, entry));
  const bool is_dst = dst_slot < -1 || dst_slot >= params.dst_slots;
  record_error(params.errors, is_dst ? BadValue::kDstIndex : BadValue::kSrcIndex, params.first_entry + entry,
               is_dst ? dst_slot : src_slot, is_dst ? params.dst_slots : params.src_slots);
}

// Where a unit lies, apart from its slots.
struct UnitPlace {
  char* dst;
  const char* src;
  uint32_t entry;
  bool is_tail;
};

__device__ inline uint32_t unit_of(uint32_t tile, int k) {
  return tile + k * kCopyThreads + thread_index();
}

// All of a thread's units at once, so that each dimension is read once.
template <int kVectorBytes, int kUnits>
__device__ inline void locate(const CopyParams& params, uint32_t tile, UnitPlace (&place)[kUnits]) {
  uint32_t rest[kUnits], plane[kUnits], i[kUnits];
  int64_t dst_offset[kUnits], src_offset[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint32_t u = unit_of(tile, k) < params.num_units ? unit_of(tile, k) : 0;
    rest[k] = divide(u, params.units_per_chunk);
    const uint32_t vector = u - rest[k] * params.units_per_chunk.size;
    dst_offset[k] = src_offset[k] = static_cast<int64_t>(vector) * kVectorBytes;
    plane[k] = place[k].entry = 0;
    place[k].is_tail =
        kUnits == kUnitsPerThread && params.tail_bytes != 0 && vector == params.units_per_chunk.size - 1;
  }
  for (int d = 0; d < params.num_dims; ++d) {
    const CopyDim& dim = params.dims[d];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const uint32_t next = divide(rest[k], dim.size);
      i[k] = rest[k] - next * dim.size.size;
      rest[k] = next;
    }
    if (d == params.entry_dim) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k)
        place[k].entry = i[k];
    } else if (d == params.plane_dim) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k)
        plane[k] = i[k];
    } else {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        dst_offset[k] += i[k] * dim.dst_stride_bytes;
        src_offset[k] += i[k] * dim.src_stride_bytes;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    place[k].dst = params.planes[plane[k]].dst + dst_offset[k];
    place[k].src = params.planes[plane[k]].src + src_offset[k];
  }
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

// A vector in registers: never two in one, which would have to be taken apart again.
template <int kBytes>
using Held = std::conditional_t<(kBytes < 4), uint32_t, Vector<kBytes>>;

// Four passes over a thread's units, so that each kind of access is in flight for all of them at once: their
// places, their indices, their loads, their stores. `Slot` is int32_t where both pools' slot numbers fit: the
// loop is short of registers.
template <int kVectorBytes, int kStripes, typename Slot>
__device__ inline void copy_rows(const CopyParams& params) {
  constexpr int kUnits = kUnitsPerThread / kStripes;
  const uint32_t count = read_count(params);
  const int64_t dst_slot_stride = params.dims[params.entry_dim].dst_stride_bytes;
  const int64_t src_slot_stride = params.dims[params.entry_dim].src_stride_bytes;
  const Slots dst = find_slots(params, params.dst_indices, 0);
  const Slots src = find_slots(params, params.src_indices, 1);
  uint32_t first_bad = kNoEntry;  // of this thread's entries; only the first of a call is kept anyway
  const int64_t stripe_bytes = static_cast<int64_t>(params.units_per_chunk.size) * kVectorBytes;
  constexpr uint32_t kTileUnits = kCopyThreads * kUnits;
  for (uint32_t tile = block_index() * kTileUnits; tile < params.num_units;
       tile += grid_blocks() * kTileUnits) {
    if (tile + grid_blocks() * kTileUnits >= params.num_units)
      let_next_launch_start();
    UnitPlace place[kUnits];
    StoredSlot dst_stored[kUnits], src_stored[kUnits];
    Held<kVectorBytes> data[kUnits][kStripes];
    locate<kVectorBytes>(params, tile, place);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      dst_stored[k] = read_slot(dst, place[k].entry);
      src_stored[k] = read_slot(src, place[k].entry);
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const bool moves = unit_of(tile, k) < params.num_units && place[k].entry < count;
      const Slot dst_slot = moves ? to_slot<Slot>(dst, dst_stored[k]) : -1;
      const Slot src_slot = moves ? to_slot<Slot>(src, src_stored[k]) : -1;
      bool is_bad;
      if (!check_slots(params, dst_slot, src_slot, is_bad)) {
        if (is_bad && place[k].entry < first_bad)
          first_bad = place[k].entry;
        place[k].dst = nullptr;
        continue;
      }
      place[k].dst += dst_slot * dst_slot_stride;
      place[k].src += src_slot * src_slot_stride;
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int s = 0; s < kStripes; ++s)
        data[k][s] = Held<kVectorBytes>{};
      if (place[k].dst == nullptr || place[k].is_tail)
        continue;
#pragma unroll
      for (int s = 0; s < kStripes; ++s)
        data[k][s] = load_vector<kVectorBytes>(place[k].src + s * stripe_bytes);
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (place[k].dst == nullptr)
        continue;
      if (place[k].is_tail) {
        copy_tail<kVectorBytes / 2>(place[k].dst, place[k].src, params.tail_bytes);
        continue;
      }
#pragma unroll
      for (int s = 0; s < kStripes; ++s)
        store_vector<kVectorBytes>(place[k].dst + s * stripe_bytes,
                                   static_cast<Vector<kVectorBytes>>(data[k][s]));
    }
  }
  if (first_bad != kNoEntry)
    report_bad_entry(params, dst, src, first_bad);
  report_clamped_count(params);
  wait_for_previous_launch();
}

}  // namespace hicache
