// The staged method. One filling of a buffer is a part: some entries of some planes, packed in the host pool's
// own order, so that neighbours in the host pool are neighbours in the buffer.
//
//   load    host pool --copy engine--> buffer --kernel--> device pool
//   store   device pool --kernel--> buffer --copy engine--> host pool
//
// Entries lie in a buffer in the order of their host slots; `places` says where. The kernel runs on the
// caller's stream and the copies on one beside it, so that buffer k + 1 fills while buffer k is emptied.
// Buffers are torch's memory, of this call alone. Host code that CUDA and HIP share.
//
// The including file supplies, from its vendor's folder: what streams.h and copy_queue.h ask for, copy_async,
// kStagedBlocks, launch_copy, select_skipped, copy_stream, Upload, empty_bytes.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "copy_launches.h"
#include "copy_queue.h"
#include "entries.h"
#include "plan.h"
#include "streams.h"

namespace hicache {

// Entries [first, first + size) of the call, as they lie in a buffer.
struct StagedRange {
  int64_t first = 0;
  int64_t size = 0;
  std::vector<HostRun> stretches;   // of entries, as their places follow each other
  std::vector<SlotRun> runs;        // host slots against places; dst_slot is the destination's
  const char* on_device = nullptr;  // for each entry its place; then, where a store needs it, its host slot
};

struct StagedPart {
  Box kernel_box;  // between device pool and buffer
  Box copy_box;    // between buffer and host pool
  Box host_box;    // between the pools: what a store puts back
  std::vector<PlaneAddress> kernel_planes;
  std::vector<PlaneAddress> copy_planes;
  StagedRange* range = nullptr;
  int64_t first_entry = 0;
};

class StagedTransfer {
 public:
  StagedTransfer(const TransferArgs& args, bool is_store, const ErrorSink& errors, const MethodTable& table,
                 const HostMemoryMap& map, GpuStream stream)
      : args_(args), is_store_(is_store), errors_(errors), table_(table), map_(map), stream_(stream) {}

  void run() {
    if (is_store_ && !device_indices().is_cpu && !args_.unreachable.empty())
      read_device_slots();
    cut();
    if (parts_.empty())
      return;
    upload();
    num_buffers_ = std::min<int64_t>(table_.staging_buffers, static_cast<int64_t>(parts_.size()));
    buffer_bytes_ = (largest_part_ + kAlignment - 1) / kAlignment * kAlignment;
    const Tensor ring = empty_bytes(num_buffers_ * buffer_bytes_, args_.device);
    ring_ = static_cast<char*>(ring.data_ptr());
    std::vector<Event> filled(num_buffers_), emptied(num_buffers_);
    Fork fork(stream_, copy_stream(args_.device.index, is_store_));
    const std::vector<const char*> seams = seams_of(args_, map_);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const size_t b = i % num_buffers_;
      const GpuStream filler = is_store_ ? stream_ : fork.stream();
      const GpuStream emptier = is_store_ ? fork.stream() : stream_;
      place(parts_[i], ring_ + b * buffer_bytes_);
      if (i >= static_cast<size_t>(num_buffers_))
        emptied[b].make_wait(filler);
      is_store_ ? run_kernel(parts_[i]) : copy(parts_[i], fork.stream(), seams);
      filled[b].record(filler);
      filled[b].make_wait(emptier);
      is_store_ ? copy(parts_[i], fork.stream(), seams) : run_kernel(parts_[i]);
      emptied[b].record(emptier);
    }
    fork.join();
  }

 private:
  static constexpr int64_t kAlignment = 256;

  const IndexView& device_indices() const {
    return is_store_ ? args_.src_indices : args_.dst_indices;
  }

  StagedRange* range_of(int64_t first, int64_t size) {
    std::unique_ptr<StagedRange>& known = ranges_[{first, size}];
    if (known != nullptr)
      return known.get();
    known = std::make_unique<StagedRange>();
    StagedRange& range = *known;
    range.first = first;
    range.size = size;
    range.stretches = sorted_part(host_runs_, first, size);
    int64_t place = 0;
    for (const HostRun& run : range.stretches) {
      if (!range.runs.empty() && host_slot(range.runs.back()) + range.runs.back().length == run.host_slot)
        range.runs.back().length += run.length;
      else
        range.runs.push_back(is_store_ ? SlotRun{run.host_slot, place, run.length}
                                       : SlotRun{place, run.host_slot, run.length});
      place += run.length;
    }
    return &range;
  }

  int64_t host_slot(const SlotRun& run) const {
    return is_store_ ? run.dst_slot : run.src_slot;
  }

  void cut() {
    host_runs_ = host_runs(args_, is_store_, [&](int64_t entry) { return !is_known_to_be_skipped(entry); });
    for (const PlaneGroup& group : args_.groups)
      for_each_launch(
          box_of(group, args_.num_entries, is_store_), [&](const Box& box, int) { add_part(box); },
          table_.staging_bytes);
  }

  void add_part(const Box& box) {
    StagedPart part;
    part.host_box = box;
    // The buffer is the destination of what fills it and the source of what empties it.
    part.kernel_box = compact_box(box, /*is_dst=*/is_store_);
    part.copy_box = compact_box(box, /*is_dst=*/!is_store_);
    part.first_entry = box.first_entry;
    int64_t entries = 0, bytes = box.chunk_bytes;
    for (size_t k = 0; k < box.num_dims; ++k) {
      bytes *= box.dims[k].size;
      if (box.dims[k].kind == BoxDim::kEntries)
        entries = box.dims[k].size;
    }
    part.range = range_of(box.first_entry, entries);
    if (part.range->runs.empty())
      return;
    largest_part_ = std::max(largest_part_, bytes);
    parts_.push_back(std::move(part));
  }

  // Sets the addresses of a part's planes once its buffer is known.
  void place(StagedPart& part, char* buffer) {
    const Box& box = part.host_box;
    int64_t plane_bytes = 0;
    for (size_t k = 0; k < box.num_dims; ++k)
      if (box.dims[k].kind == BoxDim::kPlanes)
        plane_bytes =
            is_store_ ? part.kernel_box.dims[k].dst_stride_bytes : part.kernel_box.dims[k].src_stride_bytes;
    part.kernel_planes.assign(box.planes, box.planes + box.num_planes);
    part.copy_planes = part.kernel_planes;
    for (int64_t i = 0; i < box.num_planes; ++i) {
      char* at = buffer + i * plane_bytes;
      if (is_store_) {
        part.kernel_planes[i].dst = at;
        part.copy_planes[i].src = at;
      } else {
        part.kernel_planes[i].src = at;
        part.copy_planes[i].dst = at;
      }
    }
    part.kernel_box.planes = part.kernel_planes.data();
    part.copy_box.planes = part.copy_planes.data();
  }

  // Places (and, where a store may have to put rows back, host slots) of all ranges; and the device pool's
  // slots where they are on the CPU.
  void upload() {
    const int64_t arrays = puts_back() ? 2 : 1;
    int64_t num_values = device_indices().is_cpu ? args_.num_entries : 0;
    for (const auto& [key, range] : ranges_)
      num_values += range->size * arrays;
    Upload upload(num_values * static_cast<int64_t>(sizeof(int64_t)));
    int64_t* const begin = reinterpret_cast<int64_t*>(upload.data());
    int64_t* values = begin;
    if (device_indices().is_cpu)
      values = std::copy_n(device_indices().checked(), args_.num_entries, values);
    for (auto& [key, range] : ranges_) {
      range->on_device = reinterpret_cast<const char*>(values - begin);
      write_places(*range, values, puts_back() ? values + range->size : nullptr);
      values += range->size * arrays;
    }
    uploaded_ = upload.to_device(args_.device, stream_);
    const auto* const data = static_cast<const int64_t*>(uploaded_.data_ptr());
    for (auto& [key, range] : ranges_)
      range->on_device = reinterpret_cast<const char*>(data + reinterpret_cast<intptr_t>(range->on_device));
    device_slots_ = device_indices().is_cpu ? DeviceIndices{reinterpret_cast<const char*>(data), 1, true}
                                            : DeviceIndices{device_indices().data, device_indices().stride,
                                                            device_indices().is_int64};
  }

  static void write_places(const StagedRange& range, int64_t* places, int64_t* host_slots) {
    int64_t num_placed = 0;
    for (const HostRun& run : range.stretches)
      num_placed += run.length;
    if (num_placed < range.size) {
      std::fill_n(places, range.size, int64_t{-1});
      if (host_slots != nullptr)
        std::fill_n(host_slots, range.size, int64_t{-1});
    }
    int64_t place = 0;
    for (const HostRun& run : range.stretches) {
      const int64_t at = run.first_entry - range.first;
      std::iota(places + at, places + at + run.length, place);
      if (host_slots != nullptr)
        std::iota(host_slots + at, host_slots + at + run.length, run.host_slot);
      place += run.length;
    }
  }

  // Whether the device alone knows which entries of a store are padding: their rows in the host pool must stay.
  bool puts_back() const {
    return is_store_ && !device_indices().is_cpu && known_slots_.empty();
  }

  // Pageable memory can't be read by a kernel that puts rows back, but a call with it may wait.
  void read_device_slots() {
    const IndexView& indices = device_indices();
    const int64_t n = args_.num_entries, item_bytes = indices.is_int64 ? 8 : 4;
    std::vector<char> raw(n * item_bytes);
    if (indices.stride == 0)
      copy_async(raw.data(), indices.data, item_bytes, stream_);
    else
      copy_strided_async(raw.data(), item_bytes, indices.data, indices.stride * item_bytes, item_bytes, n,
                         stream_);
    synchronize(stream_);
    const IndexView read{raw.data(), indices.stride == 0 ? 0 : 1, indices.is_int64, true};
    for (int64_t i = 0; i < n; ++i)
      known_slots_.push_back(read[i]);
  }
  bool is_known_to_be_skipped(int64_t entry) const {
    return !known_slots_.empty() && (known_slots_[entry] < 0 || known_slots_[entry] >= args_.src_slots);
  }

  // Index arrays of the call are read at first_entry + e, those of a range at e.
  static DeviceIndices shifted(const char* data, int64_t first_entry) {
    return {data - first_entry * static_cast<int64_t>(sizeof(int64_t)), 1, true};
  }

  void launch(const Box& box, const Entries& entries, int64_t dst_slots, int64_t src_slots) {
    CopyParams params = copy_params(entries, dst_slots, src_slots, errors_);
    launch_copy(params, box, vector_bytes_of(box), kStagedBlocks, /*follows=*/false, stream_);
  }

  void run_kernel(const StagedPart& part) {
    const DeviceIndices places = shifted(part.range->on_device, part.first_entry);
    Entries entries;
    entries.num_entries = args_.num_entries;
    entries.dst = is_store_ ? places : device_slots_;
    entries.src = is_store_ ? device_slots_ : places;
    const int64_t dst_slots = is_store_ ? part.range->size : args_.dst_slots;
    const int64_t src_slots = is_store_ ? args_.src_slots : part.range->size;
    launch(part.kernel_box, entries, dst_slots, src_slots);
    if (!puts_back())
      return;
    const Tensor slots = empty_bytes(part.range->size * sizeof(int64_t), args_.device);
    select_skipped(device_slots_, part.first_entry, args_.src_slots,
                   reinterpret_cast<const int64_t*>(part.range->on_device) + part.range->size, part.range->size,
                   static_cast<int64_t*>(slots.data_ptr()), stream_);
    // The rows of skipped entries travel from the host pool into the buffer, to be written back as they were.
    entries.src = shifted(static_cast<const char*>(slots.data_ptr()), part.first_entry);
    Box box = part.kernel_box;
    Box host = part.host_box;
    std::vector<PlaneAddress> planes(part.kernel_planes);
    for (size_t k = 0; k < box.num_dims; ++k)
      box.dims[k].src_stride_bytes = host.dims[k].dst_stride_bytes;
    for (int64_t i = 0; i < box.num_planes; ++i)
      planes[i].src = host.planes[i].dst;
    box.src_offset = host.dst_offset;
    box.planes = planes.data();
    launch(box, entries, part.range->size, args_.dst_slots);
  }

  void copy(const StagedPart& part, GpuStream stream, const std::vector<const char*>& seams) {
    CopyQueue queue(stream, seams);
    for_each_block(part.copy_box, part.range->runs, [&](const CopyBlock& block) { queue.add(block); });
    queue.flush();
  }

  const TransferArgs& args_;
  const bool is_store_;
  const ErrorSink& errors_;
  const MethodTable& table_;
  const HostMemoryMap& map_;
  const GpuStream stream_;
  std::vector<HostRun> host_runs_;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<StagedRange>> ranges_;
  std::vector<StagedPart> parts_;
  int64_t largest_part_ = 0;
  int64_t num_buffers_ = 0;
  int64_t buffer_bytes_ = 0;
  char* ring_ = nullptr;
  Tensor uploaded_;
  DeviceIndices device_slots_{};
  std::vector<int64_t> known_slots_;  // of the device pool, where they were on the device and had to be read
};

}  // namespace hicache
