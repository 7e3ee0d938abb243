// Cuts one PlaneGroup into kernel launches: boxes of entries, loops and planes that fit the kernel's
// parameters and a bound on bytes. Host code that CUDA and HIP share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "copy_params.h"
#include "transfer_kv.h"

namespace hicache {

// One launch that moves gigabytes holds its stream for as long; a decode step that waits behind it stalls.
constexpr int64_t kMaxLaunchBytes = int64_t{1} << 26;
// Divisor is exact below 2^31, and a tile more must not wrap.
constexpr int64_t kMaxLaunchUnits = int64_t{1} << 30;

struct BoxDim {
  enum Kind { kEntries, kLoop, kPlanes } kind;
  int64_t size;
  int64_t dst_stride_bytes;
  int64_t src_stride_bytes;
};

struct Box {
  std::vector<BoxDim> dims;  // fastest first
  std::vector<PlaneAddress> planes;
  int64_t chunk_bytes;
  int64_t first_entry;
};

// Dimensions in the order of the host pool's addresses, so that consecutive units are neighbours there.
inline Box box_of(const PlaneGroup& group, int64_t num_entries, bool is_dst_host) {
  Box box{{}, group.planes, group.chunk_bytes, 0};
  box.dims.push_back({BoxDim::kEntries, num_entries, group.dst_slot_stride_bytes, group.src_slot_stride_bytes});
  for (const Loop& loop : group.loops)
    box.dims.push_back({BoxDim::kLoop, loop.size, loop.dst_stride_bytes, loop.src_stride_bytes});
  std::stable_sort(box.dims.begin(), box.dims.end(), [&](const BoxDim& a, const BoxDim& b) {
    return is_dst_host ? std::abs(a.dst_stride_bytes) < std::abs(b.dst_stride_bytes)
                       : std::abs(a.src_stride_bytes) < std::abs(b.src_stride_bytes);
  });
  if (box.planes.size() > 1)
    box.dims.push_back({BoxDim::kPlanes, static_cast<int64_t>(box.planes.size()), 0, 0});
  return box;
}

// The part [begin, begin + size) of one dimension.
inline Box slice_box(const Box& box, size_t dim, int64_t begin, int64_t size) {
  Box part = box;
  BoxDim& cut = part.dims[dim];
  cut.size = size;
  if (cut.kind == BoxDim::kEntries) {
    part.first_entry += begin;
  } else if (cut.kind == BoxDim::kPlanes) {
    part.planes.assign(box.planes.begin() + begin, box.planes.begin() + begin + size);
  } else {
    for (PlaneAddress& plane : part.planes) {
      plane.dst += begin * cut.dst_stride_bytes;
      plane.src += begin * cut.src_stride_bytes;
    }
  }
  if (size == 1 && cut.kind != BoxDim::kEntries)
    part.dims.erase(part.dims.begin() + static_cast<int64_t>(dim));
  return part;
}

// The widest vector, up to 16 bytes, that every chunk's begin allows on both sides and a chunk can fill.
inline int vector_bytes_of(const Box& box) {
  uint64_t bits = 16;
  while (static_cast<int64_t>(bits) > box.chunk_bytes)
    bits /= 2;
  for (const PlaneAddress& plane : box.planes)
    bits |= reinterpret_cast<uintptr_t>(plane.dst) | reinterpret_cast<uintptr_t>(plane.src);
  for (const BoxDim& dim : box.dims)
    bits |= static_cast<uint64_t>(dim.dst_stride_bytes) | static_cast<uint64_t>(dim.src_stride_bytes);
  const uint64_t lowest = bits & (~bits + 1);
  return static_cast<int>(lowest);
}

// Calls launch(box, vector_bytes) for parts of `box` that a launch can take, in order.
template <typename Launch>
void for_each_launch(const Box& box, const Launch& launch) {
  if (box.dims.size() > kMaxDims) {  // more strided dimensions than parameters: loop over the shortest here
    size_t shortest = box.dims.size();
    for (size_t k = 0; k < box.dims.size(); ++k)
      if (box.dims[k].kind == BoxDim::kLoop &&
          (shortest == box.dims.size() || box.dims[k].size < box.dims[shortest].size))
        shortest = k;
    for (int64_t i = 0; i < box.dims[shortest].size; ++i)
      for_each_launch(slice_box(box, shortest, i, 1), launch);
    return;
  }
  const int vector_bytes = vector_bytes_of(box);
  const int64_t max_units = std::min(kMaxLaunchBytes / vector_bytes, kMaxLaunchUnits);
  int64_t units = (box.chunk_bytes + vector_bytes - 1) / vector_bytes;
  if (units > max_units) {  // one chunk is more than a launch
    const int64_t piece_bytes = max_units * vector_bytes;
    for (int64_t at = 0; at < box.chunk_bytes; at += piece_bytes) {
      Box piece = box;
      piece.chunk_bytes = std::min(piece_bytes, box.chunk_bytes - at);
      for (PlaneAddress& plane : piece.planes) {
        plane.dst += at;
        plane.src += at;
      }
      for_each_launch(piece, launch);
    }
    return;
  }
  for (size_t k = 0; k < box.dims.size(); ++k) {
    const BoxDim& dim = box.dims[k];
    int64_t limit = max_units / units;  // of this dimension, with all faster ones whole
    if (dim.kind == BoxDim::kPlanes)
      limit = std::min<int64_t>(limit, kMaxPlanes);
    if (dim.size > limit) {
      // Slower dimensions are walked one by one; this one in equal parts.
      for (size_t slow = box.dims.size() - 1; slow > k; --slow)
        if (box.dims[slow].size > 1) {
          for (int64_t i = 0; i < box.dims[slow].size; ++i)
            for_each_launch(slice_box(box, slow, i, 1), launch);
          return;
        }
      const int64_t parts = (dim.size + limit - 1) / limit;
      const int64_t part_size = (dim.size + parts - 1) / parts;
      for (int64_t begin = 0; begin < dim.size; begin += part_size)
        for_each_launch(slice_box(box, k, begin, std::min(part_size, dim.size - begin)), launch);
      return;
    }
    units *= dim.size;
  }
  launch(box, vector_bytes);
}

// The kernel's parameters for one such part; indices and errors are the caller's to fill.
inline void fill_box(CopyParams& params, const Box& box, int vector_bytes) {
  params.first_entry = box.first_entry;
  params.units_per_chunk =
      Divisor(static_cast<uint32_t>((box.chunk_bytes + vector_bytes - 1) / vector_bytes));
  params.tail_bytes = static_cast<uint32_t>(box.chunk_bytes % vector_bytes);
  params.num_units = params.units_per_chunk.size;
  params.num_dims = static_cast<int32_t>(box.dims.size());
  params.plane_dim = -1;
  for (size_t k = 0; k < box.dims.size(); ++k) {
    const BoxDim& dim = box.dims[k];
    params.dims[k] = {Divisor(static_cast<uint32_t>(dim.size)), dim.dst_stride_bytes, dim.src_stride_bytes};
    params.num_units *= static_cast<uint32_t>(dim.size);
    if (dim.kind == BoxDim::kEntries)
      params.entry_dim = static_cast<int32_t>(k);
    if (dim.kind == BoxDim::kPlanes)
      params.plane_dim = static_cast<int32_t>(k);
  }
  for (size_t i = 0; i < box.planes.size(); ++i) {
    params.planes[i].dst = box.planes[i].dst;
    params.planes[i].src = box.planes[i].src;
  }
}

}  // namespace hicache
