// transfer_kv on the CPU: the implementation that runs anywhere, and the template for a backend.
//
// Work is a range of bytes of rows, cut evenly among torch's threads:
//
//   groups -> planes x loops ("strips") -> runs of slots -> rows -> bytes
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>

#include "../transfer_kv.h"

namespace hicache {
namespace {

// Below this a second thread costs more than it saves (2-core x86, 2026-11-30).
constexpr int64_t kBytesPerTask = int64_t{1} << 18;
constexpr int64_t kCacheLineBytes = 64;
// Rows whose source is fetched ahead. Larger rows are streams that the hardware follows itself.
constexpr int64_t kPrefetchRows = 8;
constexpr int64_t kPrefetchMaxBytes = 2048;

// One group with its runs laid end to end: `first_row[r]` is where run r begins.
struct Work {
  const PlaneGroup& group;
  const std::vector<SlotRun>& runs;
  std::vector<int64_t> first_row;
  int64_t strip_bytes;  // bytes of all rows of one plane at one position of the loops
  bool is_merged;       // neighbouring slots are neighbouring bytes on both sides

  Work(const PlaneGroup& plane_group, const std::vector<SlotRun>& slot_runs)
      : group(plane_group), runs(slot_runs) {
    first_row.reserve(runs.size() + 1);
    int64_t rows = 0;
    for (const SlotRun& run : runs) {
      first_row.push_back(rows);
      rows += run.length;
    }
    first_row.push_back(rows);
    strip_bytes = rows * group.chunk_bytes;
    is_merged =
        group.dst_slot_stride_bytes == group.chunk_bytes && group.src_slot_stride_bytes == group.chunk_bytes;
  }
  int64_t num_strips() const {
    return static_cast<int64_t>(group.planes.size()) * group.chunks_per_plane();
  }
};

PlaneAddress strip_base(const PlaneGroup& group, int64_t strip) {
  const int64_t chunks = group.chunks_per_plane();
  PlaneAddress base = group.planes[strip / chunks];
  int64_t rest = strip % chunks;
  for (size_t k = group.loops.size(); k-- > 0;) {
    const Loop& loop = group.loops[k];
    base.dst += rest % loop.size * loop.dst_stride_bytes;
    base.src += rest % loop.size * loop.src_stride_bytes;
    rest /= loop.size;
  }
  return base;
}

void prefetch_row(const Work& work, const PlaneAddress& base, size_t run) {
  if (run >= work.runs.size())
    return;
  const char* src = base.src + work.runs[run].src_slot * work.group.src_slot_stride_bytes;
  const char* dst = base.dst + work.runs[run].dst_slot * work.group.dst_slot_stride_bytes;
  for (int64_t at = 0; at < work.group.chunk_bytes; at += kCacheLineBytes) {
    __builtin_prefetch(src + at, 0, 0);
    __builtin_prefetch(dst + at, 1, 0);
  }
}

// Bytes [begin, end) of the rows of one strip.
void copy_strip(const Work& work, const PlaneAddress& base, int64_t begin, int64_t end) {
  const PlaneGroup& group = work.group;
  const int64_t first = begin / group.chunk_bytes;
  size_t r = std::upper_bound(work.first_row.begin(), work.first_row.end(), first) - work.first_row.begin() - 1;
  const bool prefetches = group.chunk_bytes <= kPrefetchMaxBytes;
  for (int64_t at = begin; at < end;) {
    const SlotRun& run = work.runs[r];
    const int64_t run_begin = work.first_row[r] * group.chunk_bytes;
    const int64_t run_end = work.first_row[r + 1] * group.chunk_bytes;
    const int64_t row = (at - run_begin) / group.chunk_bytes;
    const int64_t in_row = (at - run_begin) % group.chunk_bytes;
    const int64_t piece_end = work.is_merged ? run_end : at + group.chunk_bytes - in_row;
    const int64_t bytes = std::min(piece_end, end) - at;
    if (prefetches && run.length == 1)
      prefetch_row(work, base, r + kPrefetchRows);
    std::memcpy(base.dst + (run.dst_slot + row) * group.dst_slot_stride_bytes + in_row,
                base.src + (run.src_slot + row) * group.src_slot_stride_bytes + in_row, bytes);
    at += bytes;
    if (at == run_end)
      ++r;
  }
}

void copy_range(int64_t begin, int64_t end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  while (begin < end) {
    const int64_t strip = begin / work.strip_bytes, offset = begin % work.strip_bytes;
    const int64_t bytes = std::min(end - begin, work.strip_bytes - offset);
    copy_strip(work, strip_base(work.group, strip), offset, offset + bytes);
    begin += bytes;
  }
}

void transfer_kv_cpu(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor& dst_indices,
                     const Tensor& src_indices, int64_t slot_dim, const std::optional<Tensor>& count,
                     const std::string& method, int64_t max_blocks) {
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks);
  if (args.is_empty())
    return;
  for (const PlaneGroup& group : args.groups) {
    Work work(group, args.runs);
    TORCH_ERROR_CODE_CHECK(
        torch_parallel_for(0, work.num_strips() * work.strip_bytes, kBytesPerTask, copy_range, &work));
  }
}

void check_errors_cpu(const Tensor&) {}  // bad indices on the CPU were raised by the call itself

}  // namespace
}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CPU, m) {
  m.impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_cpu));
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors_cpu));
}
