// Cuts a box of (planes, loops, entries) into the copies that a DMA engine is asked for: what lies together on
// both sides is one row, and rows of equal distance are one strided block. Host code that all vendors share.
//
//   box     chunk | dimensions, fastest first          what collapse() and box_of() left
//   shape   width = chunk joined with every dimension that continues it on both sides, the entries among
//           them where neighbouring slots are neighbouring bytes; `rest` are the dimensions that do not
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "copy_launches.h"
#include "transfer_kv.h"

namespace hicache {

// `height` rows of `width` bytes; pitches are the distances of their first bytes.
struct CopyBlock {
  char* dst;
  const char* src;
  int64_t width;
  int64_t height;
  int64_t dst_pitch;
  int64_t src_pitch;
};

struct BlockShape {
  int64_t width = 0;       // of one slot; a merged run is as often as long
  bool is_merged = false;  // neighbouring slots continue each other on both sides
  int64_t dst_slot_stride_bytes = 0;
  int64_t src_slot_stride_bytes = 0;
  std::array<BoxDim, 64> rest;  // loops; the last one is the longest
  size_t num_rest = 0;

  int64_t rows_per_slot() const {
    int64_t rows = 1;
    for (size_t k = 0; k < num_rest; ++k)
      rows *= rest[k].size;
    return rows;
  }
};

inline BlockShape block_shape(const Box& box) {
  BlockShape shape;
  shape.width = box.chunk_bytes;
  bool grows = true;
  for (size_t k = 0; k < box.num_dims; ++k) {
    const BoxDim& dim = box.dims[k];
    const bool continues =
        grows && !shape.is_merged && dim.dst_stride_bytes == shape.width && dim.src_stride_bytes == shape.width;
    grows = grows && continues;
    if (dim.kind == BoxDim::kEntries) {
      shape.is_merged = continues;
      shape.dst_slot_stride_bytes = dim.dst_stride_bytes;
      shape.src_slot_stride_bytes = dim.src_stride_bytes;
    } else if (dim.kind == BoxDim::kLoop) {
      if (continues)
        shape.width *= dim.size;
      else
        shape.rest[shape.num_rest++] = dim;
    }
  }
  std::stable_sort(shape.rest.begin(), shape.rest.begin() + shape.num_rest,
                   [](const BoxDim& a, const BoxDim& b) { return a.size < b.size; });
  return shape;
}

inline int64_t slots_of(const std::vector<SlotRun>& runs) {
  int64_t slots = 0;
  for (const SlotRun& run : runs)
    slots += run.length;
  return slots;
}

// How many separate rows of contiguous bytes the copies of a box have.
inline int64_t count_rows(const Box& box, const std::vector<SlotRun>& runs) {
  const BlockShape shape = block_shape(box);
  const int64_t per_plane = shape.is_merged ? static_cast<int64_t>(runs.size()) : slots_of(runs);
  return box.num_planes * shape.rows_per_slot() * per_plane;
}

namespace block_detail {

constexpr int64_t kMaxPitch = std::numeric_limits<int32_t>::max();

// Rows at equal distances: one block where a strided copy can say it, else as many of height 1.
template <typename Visit>
void visit_rows(const CopyBlock& block, const Visit& visit) {
  const auto is_pitch = [&](int64_t pitch) { return pitch >= block.width && pitch <= kMaxPitch; };
  if (block.height == 1 || (is_pitch(block.dst_pitch) && is_pitch(block.src_pitch)))
    return visit(block);
  for (int64_t row = 0; row < block.height; ++row)
    visit(CopyBlock{block.dst + row * block.dst_pitch, block.src + row * block.src_pitch, block.width, 1,
                    block.width, block.width});
}

}  // namespace block_detail

// Calls visit(CopyBlock) until all slots of `runs` are covered in all planes of the box.
template <typename Visit>
void for_each_block(const Box& box, const std::vector<SlotRun>& runs, const Visit& visit) {
  const BlockShape shape = block_shape(box);
  const int64_t slots = slots_of(runs), num_runs = static_cast<int64_t>(runs.size());
  // The height of a block is the longest dimension: the slots of a run, or a loop.
  const bool has_loop = shape.num_rest > 0;
  const bool by_loop = has_loop && (shape.is_merged || shape.rest[shape.num_rest - 1].size * num_runs > slots);
  const size_t num_outer = shape.num_rest - (by_loop ? 1 : 0);
  int64_t outer_count = 1;
  for (size_t k = 0; k < num_outer; ++k)
    outer_count *= shape.rest[k].size;
  for (int64_t p = 0; p < box.num_planes; ++p)
    for (int64_t outer = 0; outer < outer_count; ++outer) {
      char* dst = box.planes[p].dst + box.dst_offset;
      const char* src = box.planes[p].src + box.src_offset;
      int64_t number = outer;
      for (size_t k = 0; k < num_outer; ++k) {
        dst += number % shape.rest[k].size * shape.rest[k].dst_stride_bytes;
        src += number % shape.rest[k].size * shape.rest[k].src_stride_bytes;
        number /= shape.rest[k].size;
      }
      for (const SlotRun& run : runs) {
        CopyBlock block{dst + run.dst_slot * shape.dst_slot_stride_bytes,
                        src + run.src_slot * shape.src_slot_stride_bytes,
                        shape.width * (shape.is_merged ? run.length : 1),
                        1,
                        0,
                        0};
        if (by_loop) {
          const BoxDim& loop = shape.rest[shape.num_rest - 1];
          block.height = loop.size;
          block.dst_pitch = loop.dst_stride_bytes;
          block.src_pitch = loop.src_stride_bytes;
          const int64_t steps = shape.is_merged ? 1 : run.length;
          for (int64_t i = 0; i < steps; ++i) {
            block_detail::visit_rows(block, visit);
            block.dst += shape.dst_slot_stride_bytes;
            block.src += shape.src_slot_stride_bytes;
          }
          continue;
        }
        if (!shape.is_merged) {
          block.height = run.length;
          block.dst_pitch = shape.dst_slot_stride_bytes;
          block.src_pitch = shape.src_slot_stride_bytes;
        }
        block_detail::visit_rows(block, visit);
      }
    }
}

}  // namespace hicache
