// Cuts one PlaneGroup into kernel launches: boxes of entries, loops and planes that fit the kernel's
// parameters and a bound on bytes. Host code that CUDA and HIP share.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "copy_params.h"
#include "transfer_kv.h"

namespace hicache {

// One launch that moves gigabytes holds its stream for as long; a decode step that waits behind it stalls.
constexpr int64_t kMaxLaunchBytes = int64_t{1} << 28;
// Divisor is exact below 2^31, and a tile more must not wrap.
constexpr int64_t kMaxLaunchUnits = int64_t{1} << 30;

struct BoxDim {
  enum Kind { kEntries, kLoop, kPlanes } kind;
  int64_t size;
  int64_t dst_stride_bytes;
  int64_t src_stride_bytes;
};

// Copied a lot, so without memory of its own. A tensor has at most 64 dimensions.
struct Box {
  std::array<BoxDim, 64> dims;  // fastest first
  size_t num_dims = 0;
  const PlaneAddress* planes = nullptr;
  int64_t num_planes = 0;
  int64_t dst_offset = 0;  // bytes, on top of every plane's address
  int64_t src_offset = 0;
  int64_t chunk_bytes = 0;
  int64_t first_entry = 0;

  void add(const BoxDim& dim) {
    dims[num_dims++] = dim;
  }
};

// Dimensions in the order of the host pool's addresses, so that consecutive units are neighbours there.
inline Box box_of(const PlaneGroup& group, int64_t num_entries, bool is_dst_host) {
  Box box;
  box.planes = group.planes.data();
  box.num_planes = static_cast<int64_t>(group.planes.size());
  box.chunk_bytes = group.chunk_bytes;
  box.add({BoxDim::kEntries, num_entries, group.dst_slot_stride_bytes, group.src_slot_stride_bytes});
  for (const Loop& loop : group.loops)
    box.add({BoxDim::kLoop, loop.size, loop.dst_stride_bytes, loop.src_stride_bytes});
  const auto host_stride = [&](const BoxDim& dim) {
    return std::abs(is_dst_host ? dim.dst_stride_bytes : dim.src_stride_bytes);
  };
  std::sort(box.dims.begin(), box.dims.begin() + box.num_dims,
            [&](const BoxDim& a, const BoxDim& b) { return host_stride(a) < host_stride(b); });
  if (box.num_planes > 1)
    box.add({BoxDim::kPlanes, box.num_planes, 0, 0});
  return box;
}

// The part [begin, begin + size) of one dimension.
inline Box slice_box(const Box& box, size_t dim, int64_t begin, int64_t size) {
  Box part = box;
  BoxDim& cut = part.dims[dim];
  cut.size = size;
  if (cut.kind == BoxDim::kEntries) {
    part.first_entry += begin;
    return part;
  }
  if (cut.kind == BoxDim::kPlanes) {
    part.planes += begin;
    part.num_planes = size;
  } else {
    part.dst_offset += begin * cut.dst_stride_bytes;
    part.src_offset += begin * cut.src_stride_bytes;
  }
  if (size == 1) {
    std::copy(part.dims.begin() + dim + 1, part.dims.begin() + part.num_dims, part.dims.begin() + dim);
    --part.num_dims;
  }
  return part;
}

// The same box with one side packed without gaps, in the box's order: how a buffer holds it. Entries are
// numbered from 0 there; the planes' addresses are the caller's to set.
inline Box compact_box(Box box, bool is_dst) {
  int64_t stride = box.chunk_bytes;
  for (size_t k = 0; k < box.num_dims; ++k) {
    (is_dst ? box.dims[k].dst_stride_bytes : box.dims[k].src_stride_bytes) = stride;
    stride *= box.dims[k].size;
  }
  (is_dst ? box.dst_offset : box.src_offset) = 0;
  return box;
}

// The widest vector, up to 16 bytes, that a chunk can fill and that divides all addresses and strides, whose
// bits are or-ed in `address_bits`. A chunk's rest behind its last vector is copied in smaller ones.
constexpr int widest_vector(uint64_t address_bits, int64_t chunk_bytes) {
  uint64_t bits = 16;
  while (static_cast<int64_t>(bits) > chunk_bytes)
    bits /= 2;
  bits |= address_bits;
  return static_cast<int>(bits & (~bits + 1));
}
static_assert(widest_vector(576, 576) == 16 && 576 % 16 == 0, "MLA rows in fp8 move 16 bytes a thread");
static_assert(widest_vector(656, 656) == 16 && 656 % 16 == 0, "and so do those with their scales");
static_assert(widest_vector(584, 584) == 8 && widest_vector(132, 132) == 4, "less aligned rows");
static_assert(widest_vector(1, 4096) == 1 && widest_vector(0, 3) == 2, "odd addresses, short chunks");

inline int vector_bytes_of(const Box& box) {
  uint64_t bits = static_cast<uint64_t>(box.dst_offset) | static_cast<uint64_t>(box.src_offset);
  for (int64_t i = 0; i < box.num_planes; ++i)
    bits |= reinterpret_cast<uintptr_t>(box.planes[i].dst) | reinterpret_cast<uintptr_t>(box.planes[i].src);
  for (size_t k = 0; k < box.num_dims; ++k)
    bits |= static_cast<uint64_t>(box.dims[k].dst_stride_bytes) |
            static_cast<uint64_t>(box.dims[k].src_stride_bytes);
  return widest_vector(bits, box.chunk_bytes);
}

// Calls launch(box, vector_bytes) for parts of `box` that a launch can take and that move at most `max_bytes`,
// in order.
template <typename Launch>
void for_each_launch(const Box& box, const Launch& launch, int64_t max_bytes = kMaxLaunchBytes) {
  if (box.num_dims > kMaxDims) {  // more strided dimensions than parameters: loop over the shortest here
    size_t shortest = box.num_dims;
    for (size_t k = 0; k < box.num_dims; ++k)
      if (box.dims[k].kind == BoxDim::kLoop &&
          (shortest == box.num_dims || box.dims[k].size < box.dims[shortest].size))
        shortest = k;
    for (int64_t i = 0; i < box.dims[shortest].size; ++i)
      for_each_launch(slice_box(box, shortest, i, 1), launch, max_bytes);
    return;
  }
  const int vector_bytes = vector_bytes_of(box);
  // By bytes: packed in a buffer (compact_box), the same rows may have no wider vectors than these.
  const int64_t max_units = std::min(max_bytes, kMaxLaunchUnits) / vector_bytes;
  int64_t units = (box.chunk_bytes + vector_bytes - 1) / vector_bytes;
  if (units > max_units) {  // one chunk is more than a launch
    const int64_t piece_bytes = max_units * vector_bytes;
    for (int64_t at = 0; at < box.chunk_bytes; at += piece_bytes) {
      Box piece = box;
      piece.chunk_bytes = std::min(piece_bytes, box.chunk_bytes - at);
      piece.dst_offset += at;
      piece.src_offset += at;
      for_each_launch(piece, launch, max_bytes);
    }
    return;
  }
  for (size_t k = 0; k < box.num_dims; ++k) {
    const BoxDim& dim = box.dims[k];
    int64_t limit = max_units / units;  // of this dimension, with all faster ones whole
    if (dim.kind == BoxDim::kPlanes)
      limit = std::min<int64_t>(limit, kMaxPlanes);
    if (dim.size > limit) {
      // Slower dimensions are walked one by one; this one in equal parts.
      for (size_t slow = box.num_dims - 1; slow > k; --slow)
        if (box.dims[slow].size > 1) {
          for (int64_t i = 0; i < box.dims[slow].size; ++i)
            for_each_launch(slice_box(box, slow, i, 1), launch, max_bytes);
          return;
        }
      const int64_t parts = (dim.size + limit - 1) / limit;
      const int64_t part_size = (dim.size + parts - 1) / parts;
      for (int64_t begin = 0; begin < dim.size; begin += part_size)
        for_each_launch(slice_box(box, k, begin, std::min(part_size, dim.size - begin)), launch, max_bytes);
      return;
    }
    units *= dim.size;
  }
  launch(box, vector_bytes);
}

// The kernel's parameters for one such part; indices and errors are the caller's to fill. A unit is
// `vectors_per_unit` vectors, which must divide a chunk if they are more than one.
inline void fill_box(CopyParams& params, const Box& box, int vector_bytes, int vectors_per_unit = 1) {
  params.first_entry = box.first_entry;
  const int64_t unit_bytes = int64_t{vector_bytes} * vectors_per_unit;
  params.units_per_chunk = Divisor(static_cast<uint32_t>((box.chunk_bytes + unit_bytes - 1) / unit_bytes));
  params.tail_bytes = static_cast<uint32_t>(box.chunk_bytes % vector_bytes);
  params.num_units = params.units_per_chunk.size;
  params.num_dims = static_cast<int32_t>(box.num_dims);
  params.plane_dim = -1;
  for (size_t k = 0; k < box.num_dims; ++k) {
    const BoxDim& dim = box.dims[k];
    params.dims[k] = {Divisor(static_cast<uint32_t>(dim.size)), dim.dst_stride_bytes, dim.src_stride_bytes};
    params.num_units *= static_cast<uint32_t>(dim.size);
    if (dim.kind == BoxDim::kEntries)
      params.entry_dim = static_cast<int32_t>(k);
    if (dim.kind == BoxDim::kPlanes)
      params.plane_dim = static_cast<int32_t>(k);
  }
  for (int64_t i = 0; i < box.num_planes; ++i) {
    params.planes[i].dst = box.planes[i].dst + box.dst_offset;
    params.planes[i].src = box.planes[i].src + box.src_offset;
  }
}

}  // namespace hicache
