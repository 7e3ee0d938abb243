#include "copy_engine.h"

#include <algorithm>

#include "host_memory.h"
#include "runtime.h"

namespace hicache {
namespace {

constexpr size_t kMaxBatch = 4096;  // of aclrtMemcpyBatchAsync
// Width and height of aclrtMemcpy2dAsync, by CANN's documentation.
constexpr int64_t kMaxRectangleSide = 5 * 1024 * 1024;

// `height` rows of `width` bytes, each a stride further.
struct Rectangle {
  char* dst;
  const char* src;
  int64_t width;
  int64_t height;
  int64_t dst_stride;
  int64_t src_stride;
};

class Copier {
 public:
  // A rehearsal counts, and calls no driver. `seams` ascend.
  Copier(CopyKind kind, int32_t device_index, void* stream, bool is_pageable, bool is_rehearsal,
         std::vector<const char*> seams)
      : kind_(kind),
        device_index_(device_index),
        stream_(stream),
        is_pageable_(is_pageable),
        is_rehearsal_(is_rehearsal),
        seams_(std::move(seams)) {}

  const CopyCounts& counts() const {
    return counts_;
  }

  void add(const Rectangle& part) {
    if (part.height > 1 && part.dst_stride == part.width && part.src_stride == part.width)
      add_row(part.dst, part.src, part.width * part.height);
    else if (!copy_2d(part))
      for (int64_t i = 0; i < part.height; ++i)
        add_row(part.dst + i * part.dst_stride, part.src + i * part.src_stride, part.width);
  }

  // What is still collected. Also before a copy of another kind, so that all go in the caller's order.
  void flush() {
    if (dsts_.empty())
      return;
    if (!copy_batch())
      for (size_t i = 0; i < dsts_.size(); ++i)
        check_acl(submit(1,
                         [&] {
                           return driver().memcpy_async(dsts_[i], sizes_[i], srcs_[i], sizes_[i], kind_,
                                                        stream_);
                         }),
                  "aclrtMemcpyAsync");
    dsts_.clear();
    srcs_.clear();
    sizes_.clear();
  }

 private:
  template <typename Call>
  int submit(int64_t rows, const Call& call) {
    counts_.rows += rows;
    ++counts_.submissions;
    return is_rehearsal_ ? 0 : call();
  }

  // The first seam strictly inside the host's side of a copy; null without one.
  const char* seam_in(const char* dst, const char* src, int64_t nbytes) const {
    const char* begin = kind_ == kHostToDevice ? src : dst;
    const auto seam = std::upper_bound(seams_.begin(), seams_.end(), begin);
    return seam != seams_.end() && *seam < begin + nbytes ? *seam : nullptr;
  }

  void add_row(char* dst, const char* src, int64_t nbytes) {
    while (const char* seam = seam_in(dst, src, nbytes)) {
      const int64_t piece = seam - (kind_ == kHostToDevice ? src : dst);
      add_whole_row(dst, src, piece);
      dst += piece;
      src += piece;
      nbytes -= piece;
    }
    add_whole_row(dst, src, nbytes);
  }

  void add_whole_row(char* dst, const char* src, int64_t nbytes) {
    const auto size = static_cast<size_t>(nbytes);
    if (is_pageable_) {
      check_acl(submit(1, [&] { return driver().memcpy(dst, size, src, size, kind_); }), "aclrtMemcpy");
      return;
    }
    dsts_.push_back(dst);
    srcs_.push_back(const_cast<char*>(src));
    sizes_.push_back(size);
    if (dsts_.size() == kMaxBatch)
      flush();
  }

  // False where the driver has no such copy, or not for this kind or these strides.
  bool copy_2d(const Rectangle& part) {
    if (part.height == 1 || part.height > kMaxRectangleSide || part.width > kMaxRectangleSide || is_pageable_ ||
        kind_ == kDeviceToDevice || part.dst_stride < part.width || part.src_stride < part.width ||
        driver().memcpy_2d_async == nullptr)
      return false;
    const int64_t stride = kind_ == kHostToDevice ? part.src_stride : part.dst_stride;
    if (seam_in(part.dst, part.src, (part.height - 1) * stride + part.width) != nullptr)
      return false;
    flush();
    const int status = submit(part.height, [&] {
      return driver().memcpy_2d_async(part.dst, static_cast<size_t>(part.dst_stride), part.src,
                                      static_cast<size_t>(part.src_stride), static_cast<size_t>(part.width),
                                      static_cast<size_t>(part.height), kind_, stream_);
    });
    if (is_not_supported(status))
      return false;
    check_acl(status, "aclrtMemcpy2dAsync");
    return true;
  }

  bool copy_batch() {
    if (dsts_.size() == 1 || kind_ == kDeviceToDevice || driver().memcpy_batch_async == nullptr)
      return false;
    BatchAttribute attribute{};
    const auto device = static_cast<uint32_t>(device_index_);
    attribute.dst_id = kind_ == kHostToDevice ? device : 0;
    attribute.dst_type = kind_ == kHostToDevice ? kLocationDevice : kLocationHost;
    attribute.src_id = kind_ == kHostToDevice ? 0 : device;
    attribute.src_type = kind_ == kHostToDevice ? kLocationHost : kLocationDevice;
    size_t first_use = 0, failed = 0;
    const int status = submit(static_cast<int64_t>(dsts_.size()), [&] {
      return driver().memcpy_batch_async(dsts_.data(), sizes_.data(), srcs_.data(), sizes_.data(), dsts_.size(),
                                         &attribute, &first_use, 1, &failed, stream_);
    });
    if (is_not_supported(status))
      return false;
    check_acl(status, "aclrtMemcpyBatchAsync");
    return true;
  }

  CopyKind kind_;
  int32_t device_index_;
  void* stream_;
  bool is_pageable_;
  bool is_rehearsal_;
  std::vector<const char*> seams_;
  CopyCounts counts_;
  std::vector<void*> dsts_, srcs_;
  std::vector<size_t> sizes_;
};

// One run of one plane: the longest of its dimensions becomes the height, the others are walked.
void add_run(Copier& copier, const PlaneGroup& group, const PlaneAddress& plane, const SlotRun& run) {
  std::vector<Loop> dims = group.loops;
  dims.push_back({run.length, group.dst_slot_stride_bytes, group.src_slot_stride_bytes});
  char* dst = plane.dst + run.dst_slot * group.dst_slot_stride_bytes;
  const char* src = plane.src + run.src_slot * group.src_slot_stride_bytes;
  const auto is_whole = [&](const Loop& dim) {
    return dim.dst_stride_bytes == group.chunk_bytes && dim.src_stride_bytes == group.chunk_bytes;
  };
  // Rows that touch need no stride at all, so they win over longer ones.
  const auto height = std::max_element(dims.begin(), dims.end(), [&](const Loop& a, const Loop& b) {
    return std::pair(is_whole(a), a.size) < std::pair(is_whole(b), b.size);
  });
  const Loop rows = *height;
  dims.erase(height);
  int64_t count = 1;
  for (const Loop& dim : dims)
    count *= dim.size;
  for (int64_t number = 0; number < count; ++number) {
    Rectangle part{dst, src, group.chunk_bytes, rows.size, rows.dst_stride_bytes, rows.src_stride_bytes};
    int64_t rest = number;
    for (size_t k = dims.size(); k-- > 0;) {
      part.dst += rest % dims[k].size * dims[k].dst_stride_bytes;
      part.src += rest % dims[k].size * dims[k].src_stride_bytes;
      rest /= dims[k].size;
    }
    copier.add(part);
  }
}

CopyKind kind_of_call(const TransferArgs& args) {
  return args.dst_device.is_cpu() ? kDeviceToHost : args.src_device.is_cpu() ? kHostToDevice : kDeviceToDevice;
}

bool has_pageable_memory(const TransferArgs& args, CopyKind kind) {
  if (kind == kDeviceToDevice)
    return false;
  const std::vector<Extent>& extents = kind == kHostToDevice ? args.src_extents : args.dst_extents;
  return std::any_of(extents.begin(), extents.end(),
                     [](const Extent& extent) { return kind_of(extent.begin) == HostMemory::kPageable; });
}

// Pinned memory is registered in pieces where it is large.
std::vector<const char*> seams_of(const TransferArgs& args, CopyKind kind) {
  std::vector<const char*> seams;
  if (kind != kDeviceToDevice)
    for (const Extent& extent : kind == kHostToDevice ? args.src_extents : args.dst_extents)
      for (const char* seam : registration_seams(extent.begin, extent.end))
        seams.push_back(seam);
  std::sort(seams.begin(), seams.end());
  return seams;
}

CopyCounts copy(const TransferArgs& args, CopyKind kind, bool is_pageable, void* stream, bool is_rehearsal) {
  Copier copier(kind, args.device.index, stream, is_pageable, is_rehearsal, seams_of(args, kind));
  const std::vector<SlotRun> runs = slot_runs(args);
  for (const PlaneGroup& group : args.groups)
    for (const PlaneAddress& plane : group.planes)
      for (const SlotRun& run : runs)
        add_run(copier, group, plane, run);
  copier.flush();
  return copier.counts();
}

}  // namespace

void copy_by_engine(const TransferArgs& args) {
  const CopyKind kind = kind_of_call(args);
  const bool is_pageable = has_pageable_memory(args, kind);
  void* stream = current_stream(args.device.index);
  if (is_pageable)  // the driver's copies from such memory keep no order with the stream
    check_acl(driver().synchronize_stream(stream), "aclrtSynchronizeStream");
  (void)copy(args, kind, is_pageable, stream, /*is_rehearsal=*/false);
}

CopyCounts count_copies(const TransferArgs& args) {
  const CopyKind kind = kind_of_call(args);
  return copy(args, kind, has_pageable_memory(args, kind), nullptr, /*is_rehearsal=*/true);
}

}  // namespace hicache
