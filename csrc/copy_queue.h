// Collects the copies of a call for the copy engine and hands them over in batches. Host code that CUDA and HIP
// share.
//
// The including file supplies, from its vendor's folder: GpuStream, copy_strided_async, submit_copies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "copy_blocks.h"
#include "plan.h"
#include "transfer_kv.h"

namespace hicache {

// A strided copy moves 29 to 37 GB/s with rows of 256 B to 4 KiB, where a batch of such rows moves 3 to 5; rows
// of 64 KiB are the batch's (H200, 2026-11-30).
constexpr int64_t kMaxStridedWidth = int64_t{32} << 10;

// Copies for one stream.
class CopyQueue {
 public:
  // `seams`: device addresses, ascending, over which no copy may lead.
  CopyQueue(GpuStream stream, std::vector<const char*> seams) : stream_(stream), seams_(std::move(seams)) {}

  void add(const CopyBlock& block) {
    const int64_t dst_span = (block.height - 1) * block.dst_pitch + block.width;
    const int64_t src_span = (block.height - 1) * block.src_pitch + block.width;
    const bool has_seam = !seams_.empty() && (next_seam(block.dst, block.dst + dst_span) != nullptr ||
                                              next_seam(block.src, block.src + src_span) != nullptr);
    if (block.height > 1 && block.width <= kMaxStridedWidth && !has_seam) {
      copy_strided_async(block.dst, block.dst_pitch, block.src, block.src_pitch, block.width, block.height,
                         stream_);
      return;
    }
    for (int64_t row = 0; row < block.height; ++row)
      add_row(block.dst + row * block.dst_pitch, block.src + row * block.src_pitch, block.width);
  }

  // Submits what is left. Without it, copies may be lost.
  void flush() {
    submit_copies(dst_, src_, sizes_, stream_);
    dst_.clear();
    src_.clear();
    sizes_.clear();
  }

 private:
  void add_row(char* dst, const char* src, int64_t bytes) {
    while (bytes > 0) {
      int64_t piece = bytes;
      if (!seams_.empty()) {
        if (const char* seam = next_seam(dst, dst + piece))
          piece = seam - dst;
        if (const char* seam = next_seam(src, src + piece))
          piece = seam - src;
      }
      dst_.push_back(dst);
      src_.push_back(src);
      sizes_.push_back(static_cast<size_t>(piece));
      if (dst_.size() == kMaxBatchCopies)
        flush();
      dst += piece;
      src += piece;
      bytes -= piece;
    }
  }

  // The first seam strictly inside a range, or null.
  const char* next_seam(const char* begin, const char* end) const {
    const auto seam = std::upper_bound(seams_.begin(), seams_.end(), begin);
    return seam != seams_.end() && *seam < end ? *seam : nullptr;
  }

  GpuStream stream_;
  std::vector<const char*> seams_;
  std::vector<void*> dst_;
  std::vector<const void*> src_;
  std::vector<size_t> sizes_;
};

// The seams in the host memory of a call, as addresses of the device.
inline std::vector<const char*> seams_of(const TransferArgs& args, const HostMemoryMap& map) {
  std::vector<const char*> seams;
  const auto add = [&](const std::vector<Extent>& extents) {
    for (const Extent& extent : extents)
      for (const char* seam : map.seams(extent.begin, extent.end))
        seams.push_back(map.device_address(seam, seam + 1));
  };
  add(args.dst_extents);
  add(args.src_extents);
  std::sort(seams.begin(), seams.end());
  seams.erase(std::unique(seams.begin(), seams.end()), seams.end());
  return seams;
}

// All copies of the copy_engine method.
inline void queue_copies(const TransferArgs& args, bool is_store, const HostMemoryMap& map, GpuStream stream) {
  const std::vector<SlotRun> runs = slot_runs(args);
  CopyQueue queue(stream, seams_of(args, map));
  for (const PlaneGroup& group : args.groups)
    for_each_block(box_of(group, args.num_entries, is_store), runs,
                   [&](const CopyBlock& block) { queue.add(block); });
  queue.flush();
}

}  // namespace hicache
