#include "copy_engine.h"

#include <dlfcn.h>

#include <algorithm>

#include "../plan.h"
#include "host_memory.h"
#include "runtime.h"
#include "streams.h"

namespace hicache {
namespace {

// A strided copy moves 29 to 37 GB/s with rows of 256 B to 4 KiB, where a batch of such rows moves 3 to 5; rows
// of 64 KiB are the batch's (H200, 2026-11-30).
constexpr int64_t kMaxStridedWidth = int64_t{32} << 10;

// cuMemcpyBatchAsync as CUDA 12.8 introduced it. It is asked from the driver by that version, so its signature
// is known whatever toolkit built this file; drivers without it answer with nothing.
struct BatchAttributes {
  int src_access_order;
  int src_location_type, src_location_id;
  int dst_location_type, dst_location_id;
  unsigned flags;
};
constexpr int kStreamAccessOrder = 1;  // sources are read in stream order, not when the call is made
using MemcpyBatch = int (*)(uintptr_t* dsts, uintptr_t* srcs, size_t* sizes, size_t count,
                            BatchAttributes* attributes, size_t* attribute_begins, size_t num_attributes,
                            size_t* failed, cudaStream_t stream);
using GetProcAddress = int (*)(const char* symbol, void** function, int version, uint64_t flags, int* status);

MemcpyBatch find_memcpy_batch() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr)
    return nullptr;
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(driver, "cuGetProcAddress_v2"));
  void* function = nullptr;
  int status = 0;
  if (get == nullptr || get("cuMemcpyBatchAsync", &function, 12080, 0, &status) != 0)
    return nullptr;
  return reinterpret_cast<MemcpyBatch>(function);
}

MemcpyBatch memcpy_batch() {
  static const MemcpyBatch function = find_memcpy_batch();
  return function;
}

bool is_legacy(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy;
}

}  // namespace

CopyQueue::CopyQueue(cudaStream_t stream, std::vector<const char*> seams)
    : stream_(stream), seams_(std::move(seams)) {}

// The first seam strictly inside a range, or null.
const char* CopyQueue::next_seam(const char* begin, const char* end) const {
  const auto seam = std::upper_bound(seams_.begin(), seams_.end(), begin);
  return seam != seams_.end() && *seam < end ? *seam : nullptr;
}

void CopyQueue::add_row(char* dst, const char* src, int64_t bytes) {
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

void CopyQueue::add(const CopyBlock& block) {
  const int64_t dst_span = (block.height - 1) * block.dst_pitch + block.width;
  const int64_t src_span = (block.height - 1) * block.src_pitch + block.width;
  const bool has_seam = !seams_.empty() && (next_seam(block.dst, block.dst + dst_span) != nullptr ||
                                            next_seam(block.src, block.src + src_span) != nullptr);
  if (block.height > 1 && block.width <= kMaxStridedWidth && !has_seam) {
    check_cuda(cudaMemcpy2DAsync(block.dst, block.dst_pitch, block.src, block.src_pitch, block.width,
                                 block.height, cudaMemcpyDefault, stream_),
               "cudaMemcpy2DAsync");
    return;
  }
  for (int64_t row = 0; row < block.height; ++row)
    add_row(block.dst + row * block.dst_pitch, block.src + row * block.src_pitch, block.width);
}

void CopyQueue::flush() {
  size_t done = 0;
  if (dst_.size() > 1 && memcpy_batch() != nullptr) {
    BatchAttributes attributes{kStreamAccessOrder, 0, 0, 0, 0, 0};
    size_t first = 0, failed = 0;
    const int status = memcpy_batch()(reinterpret_cast<uintptr_t*>(dst_.data()),
                                      reinterpret_cast<uintptr_t*>(const_cast<void**>(src_.data())),
                                      sizes_.data(), dst_.size(), &attributes, &first, 1, &failed, stream_);
    if (status == 0)
      done = dst_.size();
    else
      (void)cudaGetLastError();  // not for this driver or memory: one by one, and again what it may have taken
  }
  for (size_t i = done; i < dst_.size(); ++i)
    check_cuda(cudaMemcpyAsync(dst_[i], src_[i], sizes_[i], cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  dst_.clear();
  src_.clear();
  sizes_.clear();
}

std::vector<const char*> seams_of(const TransferArgs& args) {
  std::vector<const char*> seams;
  const CudaHostMemoryMap map;
  const auto add = [&](const std::vector<Extent>& extents) {
    for (const Extent& extent : extents)
      for (const char* seam : registration_seams(extent.begin, extent.end))
        seams.push_back(map.device_address(seam, seam + 1));
  };
  add(args.dst_extents);
  add(args.src_extents);
  std::sort(seams.begin(), seams.end());
  seams.erase(std::unique(seams.begin(), seams.end()), seams.end());
  return seams;
}

void transfer_by_copy_engine(const TransferArgs& args, bool is_store, cudaStream_t stream) {
  const std::vector<SlotRun> runs = slot_runs(args);
  const auto copy = [&](cudaStream_t on) {
    CopyQueue queue(on, seams_of(args));
    for (const PlaneGroup& group : args.groups)
      for_each_block(box_of(group, args.num_entries, is_store), runs,
                     [&](const CopyBlock& block) { queue.add(block); });
    queue.flush();
  };
  if (!is_legacy(stream))
    return copy(stream);
  Fork fork(stream, copy_stream(args.device.index, is_store));
  copy(fork.stream());
  fork.join();
}

}  // namespace hicache
