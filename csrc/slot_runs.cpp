// What the host can do with indices that it can read: check their range, resolve duplicate
// destinations, merge neighbours into runs, and refuse a call whose bytes overlap.
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "text.h"
#include "transfer_kv.h"

namespace hicache {
namespace {

[[noreturn]] void throw_out_of_range(const char* name, int64_t position, int64_t value, int64_t slots) {
  const bool has_limit = slots != std::numeric_limits<int64_t>::max();  // a call without planes has none
  throw std::out_of_range(concat("[transfer_kv] ", name, "[", position, "] is ", value,
                                 has_limit ? concat(", out of range for ", slots, " slots") : ", below 0",
                                 " (-1 skips an entry)."));
}

// A search for the first bad position, shared by the threads that copy and check parts of the indices.
struct RangeCheck {
  const IndexView& indices;
  int64_t* copy;
  int64_t slots;
  std::atomic<int64_t> first_bad;
};

template <typename Index>
void check_part(int64_t begin, int64_t end, void* context) {
  RangeCheck& check = *static_cast<RangeCheck*>(context);
  const Index* data = static_cast<const Index*>(check.indices.data);
  const int64_t stride = check.indices.stride, slots = check.slots;
  int64_t* copy = check.copy;
  for (int64_t i = begin; i < end; ++i)
    copy[i] = data[i * stride];
  bool is_bad = false;  // no branch in the loop, for the compiler's sake
  for (int64_t i = begin; i < end; ++i)
    is_bad |= copy[i] < -1 || copy[i] >= slots;
  for (int64_t i = begin; is_bad && i < end; ++i)
    if (copy[i] < -1 || copy[i] >= slots) {
      int64_t known = check.first_bad;
      while (i < known && !check.first_bad.compare_exchange_weak(known, i)) {
      }
      return;
    }
}

// Lets `indices` name a checked copy.
std::unique_ptr<int64_t[]> read_indices(IndexView& indices, int64_t num_entries, int64_t slots,
                                        const char* name) {
  constexpr int64_t kEntriesPerTask = int64_t{1} << 16;
  std::unique_ptr<int64_t[]> copy(new int64_t[num_entries]);
  RangeCheck check{indices, copy.get(), slots, {num_entries}};
  const auto part = indices.is_int64 ? check_part<int64_t> : check_part<int32_t>;
  if (num_entries <= kEntriesPerTask)
    part(0, num_entries, &check);
  else
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, num_entries, kEntriesPerTask, part, &check));
  if (check.first_bad < num_entries)
    throw_out_of_range(name, check.first_bad, copy[check.first_bad], slots);
  indices.data = copy.get();
  indices.stride = 1;
  indices.is_int64 = true;
  return copy;
}

// A set of slots: one bit a slot where that is small beside the work, else a hash table.
class SlotSet {
 public:
  SlotSet(int64_t slots, int64_t capacity) {
    if (slots / 256 <= capacity + 1024) {
      bits_.resize(slots / 64 + 1);
      return;
    }
    size_t size = 64;
    while (size < static_cast<size_t>(capacity) * 2)
      size *= 2;
    table_.assign(size, kFree);
  }

  // True when the slot was not in the set yet.
  bool insert(int64_t slot) {
    if (!bits_.empty()) {
      uint64_t& word = bits_[slot / 64];
      const uint64_t bit = uint64_t{1} << (slot % 64);
      const bool is_new = (word & bit) == 0;
      word |= bit;
      return is_new;
    }
    const size_t mask = table_.size() - 1;
    size_t at = (static_cast<uint64_t>(slot) * 0x9E3779B97F4A7C15u >> 20) & mask;
    for (; table_[at] != kFree; at = (at + 1) & mask)
      if (table_[at] == slot)
        return false;
    table_[at] = slot;
    return true;
  }

 private:
  static constexpr int64_t kFree = -1;
  std::vector<uint64_t> bits_;
  std::vector<int64_t> table_;
};

// Whether the slots are known to differ from each other: they come in few ascending stretches, of which no two
// meet. False where nothing can be said so cheaply.
bool are_distinct_stretches(const int64_t* slots, int64_t num_entries) {
  constexpr int64_t kMinMeanLength = 8;
  std::vector<std::pair<int64_t, int64_t>> stretches;  // first and last slot
  for (int64_t i = 0; i < num_entries;) {
    const int64_t first = i++;
    while (i < num_entries && slots[i] > slots[i - 1])
      ++i;
    if (static_cast<int64_t>(stretches.size()) * kMinMeanLength > num_entries)
      return false;
    stretches.emplace_back(slots[first], slots[i - 1]);
  }
  std::sort(stretches.begin(), stretches.end());
  for (size_t k = 1; k < stretches.size(); ++k)
    if (stretches[k].first <= stretches[k - 1].second)
      return false;
  return true;
}

bool descends(const int64_t* slots, int64_t num_entries) {
  for (int64_t i = 1; i < num_entries; ++i)
    if (slots[i] >= slots[i - 1])
      return false;
  return true;
}

// Positions whose destination a later entry writes again, as flags; empty when there are none.
std::vector<bool> overwritten_entries(const TransferArgs& args) {
  const int64_t n = args.num_entries;
  const int64_t* slots = args.dst_indices.checked();
  if (descends(slots, n) || are_distinct_stretches(slots, n))
    return {};
  std::vector<bool> overwritten;
  SlotSet seen(args.dst_slots, n);
  for (int64_t i = n - 1; i >= 0; --i) {
    const bool is_padding = slots[i] < 0 || (args.src_indices.is_cpu && args.src_indices.checked()[i] < 0);
    if (is_padding || seen.insert(slots[i]))
      continue;
    if (overwritten.empty())
      overwritten.resize(n);
    overwritten[i] = true;
  }
  return overwritten;
}

// One contiguous piece of one side. Source and destination piece of one copy share `copy`.
struct Piece {
  const char* begin;
  const char* end;
  int64_t copy;
  int64_t run;
};

void append_pieces(const PlaneGroup& group, const SlotRun& run, int64_t run_number, int64_t& copy,
                   std::vector<Piece>& dst, std::vector<Piece>& src) {
  const bool is_merged =
      group.dst_slot_stride_bytes == group.chunk_bytes && group.src_slot_stride_bytes == group.chunk_bytes;
  const int64_t rows = is_merged ? 1 : run.length;
  const int64_t bytes = is_merged ? group.chunk_bytes * run.length : group.chunk_bytes;
  for (const PlaneAddress& plane : group.planes)
    for (int64_t chunk = 0, chunks = group.chunks_per_plane(); chunk < chunks; ++chunk) {
      int64_t dst_offset = run.dst_slot * group.dst_slot_stride_bytes;
      int64_t src_offset = run.src_slot * group.src_slot_stride_bytes;
      int64_t rest = chunk;
      for (size_t k = group.loops.size(); k-- > 0; rest /= group.loops[k].size) {
        dst_offset += rest % group.loops[k].size * group.loops[k].dst_stride_bytes;
        src_offset += rest % group.loops[k].size * group.loops[k].src_stride_bytes;
      }
      for (int64_t row = 0; row < rows; ++row, ++copy) {
        const char* dst_begin = plane.dst + dst_offset + row * group.dst_slot_stride_bytes;
        const char* src_begin = plane.src + src_offset + row * group.src_slot_stride_bytes;
        dst.push_back({dst_begin, dst_begin + bytes, copy, run_number});
        src.push_back({src_begin, src_begin + bytes, copy, run_number});
      }
    }
}

bool extents_meet(std::vector<Extent> dst, std::vector<Extent> src) {
  const auto by_begin = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  std::sort(dst.begin(), dst.end(), by_begin);
  std::sort(src.begin(), src.end(), by_begin);
  const char* dst_end = nullptr;
  const char* src_end = nullptr;
  size_t d = 0, s = 0;
  while (d < dst.size() || s < src.size()) {
    if (s == src.size() || (d < dst.size() && dst[d].begin <= src[s].begin)) {
      if (dst[d].begin < src_end)
        return true;
      dst_end = std::max(dst_end, dst[d++].end);
    } else {
      if (src[s].begin < dst_end)
        return true;
      src_end = std::max(src_end, src[s++].end);
    }
  }
  return false;
}

// Refuses a call that reads bytes which it also writes; a slot copied onto itself is harmless.
void check_overlap(const TransferArgs& args) {
  if (!extents_meet(args.dst_extents, args.src_extents))
    return;
  const std::vector<SlotRun> runs = slot_runs(args);
  std::vector<Piece> dst, src;
  int64_t copy = 0;
  for (size_t r = 0; r < runs.size(); ++r)
    for (const PlaneGroup& group : args.groups)
      append_pieces(group, runs[r], static_cast<int64_t>(r), copy, dst, src);
  const auto by_begin = [](const Piece& a, const Piece& b) { return a.begin < b.begin; };
  std::sort(dst.begin(), dst.end(), by_begin);
  std::sort(src.begin(), src.end(), by_begin);
  // Sweep: for each source the destinations that begin before its end and end behind its begin.
  size_t first = 0;
  for (const Piece& s : src) {
    while (first < dst.size() && dst[first].end <= s.begin)
      ++first;
    for (size_t d = first; d < dst.size() && dst[d].begin < s.end; ++d) {
      const bool is_itself = dst[d].copy == s.copy && dst[d].begin == s.begin;
      if (is_itself || dst[d].end <= s.begin)
        continue;
      const SlotRun &writer = runs[dst[d].run], &reader = runs[s.run];
      throw std::invalid_argument(concat(
          "[transfer_kv] destination and source overlap: the call writes bytes that it also reads (dst slots ",
          writer.dst_slot, " to ", writer.dst_slot + writer.length - 1, " against src slots ", reader.src_slot,
          " to ", reader.src_slot + reader.length - 1, "). Copy through a buffer instead."));
    }
  }
}

}  // namespace

void check_cpu_indices(TransferArgs& args) {
  if (args.dst_indices.is_cpu)
    args.checked_dst_indices = read_indices(args.dst_indices, args.num_entries, args.dst_slots, "dst_indices");
  if (args.src_indices.is_cpu)
    args.checked_src_indices = read_indices(args.src_indices, args.num_entries, args.src_slots, "src_indices");
  if (args.groups.empty())
    return;
  if (args.has_cpu_indices())
    check_overlap(args);  // of all entries, those that others overwrite too
  if (args.dst_indices.is_cpu)
    args.overwritten = overwritten_entries(args);
}

std::vector<SlotRun> slot_runs(const TransferArgs& args) {
  std::vector<SlotRun> runs;
  int64_t step = 0;  // of the run being built: 0 while it has one entry
  for_each_entry(args, 0, args.num_entries, [&](int64_t dst_slot, int64_t src_slot) {
    if (!runs.empty()) {
      SlotRun& run = runs.back();
      if (step >= 0 && dst_slot == run.dst_slot + run.length && src_slot == run.src_slot + run.length) {
        ++run.length;
        step = 1;
        return;
      }
      if (step <= 0 && dst_slot == run.dst_slot - 1 && src_slot == run.src_slot - 1) {
        --run.dst_slot;
        --run.src_slot;
        ++run.length;
        step = -1;
        return;
      }
    }
    runs.push_back({dst_slot, src_slot, 1});
    step = 0;
  });
  return runs;
}

}  // namespace hicache
