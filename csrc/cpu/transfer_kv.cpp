// transfer_kv on the CPU: the implementation that runs anywhere, and the template for a backend.
//
// Work is a range of rows, cut evenly among torch's threads:
//
//   groups -> planes x loops ("strips") -> pieces of a large chunk -> entries
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>

#include "../known_calls.h"
#include "../plan.h"
#include "../transfer_kv.h"

namespace hicache {
namespace {

// Below this a second thread costs more than it saves (2-core x86, 2026-11-30).
constexpr int64_t kBytesPerTask = int64_t{1} << 20;
// Larger chunks are cut, so that a few of them keep all threads busy.
constexpr int64_t kMaxPieceBytes = int64_t{1} << 20;
constexpr int64_t kCacheLineBytes = 64;
// Rows whose source is fetched ahead. Larger rows are streams that the hardware follows itself.
constexpr int64_t kPrefetchRows = 8;
constexpr int64_t kPrefetchMaxBytes = 2048;
constexpr int64_t kBlockEntries = 512;

// One group of a call. Row number r is entry r % entries of strip r / entries.
struct Work {
  const TransferArgs& args;
  const PlaneGroup& group;
  int64_t pieces;       // of one chunk
  int64_t piece_bytes;  // of all but the last
  bool is_merged;       // neighbouring slots are neighbouring bytes on both sides

  Work(const TransferArgs& transfer_args, const PlaneGroup& plane_group)
      : args(transfer_args), group(plane_group) {
    pieces = (group.chunk_bytes + kMaxPieceBytes - 1) / kMaxPieceBytes;
    piece_bytes = (group.chunk_bytes + pieces - 1) / pieces;
    is_merged = pieces == 1 && group.dst_slot_stride_bytes == group.chunk_bytes &&
                group.src_slot_stride_bytes == group.chunk_bytes;
  }
  int64_t num_rows() const {
    return static_cast<int64_t>(group.planes.size()) * group.chunks_per_plane() * pieces * args.num_entries;
  }
};

struct Strip {
  char* dst;
  const char* src;
  int64_t row_bytes;
};

Strip strip_at(const Work& work, int64_t number) {
  const PlaneGroup& group = work.group;
  const int64_t first_byte = number % work.pieces * work.piece_bytes;
  int64_t rest = number / work.pieces;
  const int64_t chunks = group.chunks_per_plane();
  const PlaneAddress& plane = group.planes[rest / chunks];
  Strip strip{plane.dst + first_byte, plane.src + first_byte,
              std::min(work.piece_bytes, group.chunk_bytes - first_byte)};
  rest %= chunks;
  for (size_t k = group.loops.size(); k-- > 0;) {
    const Loop& loop = group.loops[k];
    strip.dst += rest % loop.size * loop.dst_stride_bytes;
    strip.src += rest % loop.size * loop.src_stride_bytes;
    rest /= loop.size;
  }
  return strip;
}

// Byte offsets of the entries of one block that move.
struct Block {
  int64_t size = 0;
  int64_t dst[kBlockEntries];
  int64_t src[kBlockEntries];
};

// How many entries from `first` on lie in one piece of memory on both sides, going up or down by `step`.
int64_t run_length(const Block& block, int64_t first, int64_t step) {
  int64_t length = 1;
  while (first + length < block.size && block.dst[first + length] == block.dst[first] + length * step &&
         block.src[first + length] == block.src[first] + length * step)
    ++length;
  return length;
}

void copy_block(const Strip& strip, const Block& block, bool is_merged) {
  const bool prefetches = strip.row_bytes <= kPrefetchMaxBytes;
  for (int64_t i = 0; i < block.size;) {
    int64_t length = 1, lowest = i;
    if (is_merged) {
      length = run_length(block, i, strip.row_bytes);
      if (length == 1)
        length = run_length(block, i, -strip.row_bytes);
      if (length > 1 && block.dst[i + 1] < block.dst[i])
        lowest = i + length - 1;
    }
    if (prefetches && i + kPrefetchRows < block.size)
      for (int64_t at = 0; at < strip.row_bytes; at += kCacheLineBytes)
        __builtin_prefetch(strip.src + block.src[i + kPrefetchRows] + at, 0, 0);
    std::memcpy(strip.dst + block.dst[lowest], strip.src + block.src[lowest], length * strip.row_bytes);
    i += length;
  }
}

// Entries [begin, end) of one strip.
void copy_strip(const Work& work, const Strip& strip, int64_t begin, int64_t end) {
  const int64_t dst_stride = work.group.dst_slot_stride_bytes, src_stride = work.group.src_slot_stride_bytes;
  Block block;
  for (; begin < end; begin += kBlockEntries) {
    block.size = 0;
    for_each_entry(work.args, begin, std::min(begin + kBlockEntries, end),
                   [&](int64_t dst_slot, int64_t src_slot) {
                     block.dst[block.size] = dst_slot * dst_stride;
                     block.src[block.size++] = src_slot * src_stride;
                   });
    copy_block(strip, block, work.is_merged);
  }
}

void copy_rows(int64_t begin, int64_t end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const int64_t entries = work.args.num_entries;
  while (begin < end) {
    const int64_t first = begin % entries;
    const int64_t count = std::min(end - begin, entries - first);
    copy_strip(work, strip_at(work, begin / entries), first, first + count);
    begin += count;
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
    Work work(args, group);
    const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / work.piece_bytes);
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, work.num_rows(), rows_per_task, copy_rows, &work));
  }
}

std::string explain_cpu(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                        const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                        const std::optional<Tensor>& count, const std::string& method, int64_t max_blocks) {
  const TransferArgs args =
      plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks);
  Plan plan;
  plan.bytes = moved_bytes(args);
  plan.batches = args.is_empty() ? 0 : 1;
  plan.reason = "both pools are on the CPU";
  return plan_text(plan);
}

std::string explain_as_if(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                          const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                          const std::optional<Tensor>& count, const std::string& method,
                          const std::vector<bool>& on_device, bool capturing, bool pageable,
                          const std::vector<int64_t>& table) {
  if (on_device.size() != 4)
    throw std::invalid_argument("[explain] on_device has 4 values.");
  TransferArgs args = plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, "auto", 0);
  args.method = parse_method(method);
  args.device = {1, 0};
  args.dst_device = on_device[0] ? args.device : Device{};
  args.src_device = on_device[1] ? args.device : Device{};
  args.dst_indices.is_cpu = !on_device[2];
  args.src_indices.is_cpu = !on_device[3];
  if (pageable)
    args.unreachable = on_device[0] ? "src[0]" : "dst[0]";
  const Direction direction = !on_device[0]   ? Direction::kStore
                              : !on_device[1] ? Direction::kLoad
                                              : Direction::kOnDevice;
  return plan_text(choose_method(args, direction, capturing, method_table_from(table), /*explains=*/true));
}

void set_method_table_cpu(const Tensor&, const std::vector<int64_t>& values) {
  (void)method_table_from(values);
}

void check_errors_cpu(const Tensor&) {}  // bad indices on the CPU were raised by the call itself

}  // namespace
}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CPU, m) {
  m.impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_cpu));
  m.impl("transfer_known", TORCH_BOX(&hicache::transfer_known<hicache::transfer_kv_cpu>));
  m.impl("keep_call", TORCH_BOX(&hicache::keep_call));
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors_cpu));
  m.impl("explain", TORCH_BOX(&hicache::explain_cpu));
  m.impl("set_method_table", TORCH_BOX(&hicache::set_method_table_cpu));
  m.impl("explain_as_if", TORCH_BOX(&hicache::explain_as_if));
}
