// hicache::transfer_kv, the part that every backend shares: the checks of a call
// and its reduction to plain addresses, sizes and strides.
//
// This header must not hold device code or anything of one vendor. `plan_transfer` is
// the last place that knows torch's Tensor; a backend sees TransferArgs only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hicache {

using torch::stable::Tensor;

enum class Method { kAuto, kKernel, kCopyEngine, kStaged };

struct Device {
  int32_t type = 0;  // torch's own numbering, fixed by its ABI; 0 is the CPU
  int32_t index = -1;

  bool is_cpu() const {
    return type == 0;
  }
  bool operator==(const Device& other) const {
    return type == other.type && (is_cpu() || index == other.index);
  }
  bool operator!=(const Device& other) const {
    return !(*this == other);
  }
};

// A dimension that both sides walk, each with a stride of its own.
struct Loop {
  int64_t size;
  int64_t dst_stride_bytes;
  int64_t src_stride_bytes;
  bool operator==(const Loop& other) const {
    return size == other.size && dst_stride_bytes == other.dst_stride_bytes &&
           src_stride_bytes == other.src_stride_bytes;
  }
};

struct PlaneAddress {
  char* dst;
  const char* src;
};

// Planes of equal geometry. One slot of one plane is `chunk_bytes` contiguous bytes, repeated
// over `loops` (slowest first, by the destination's stride):
//
//   base + slot * slot_stride + sum over k of i[k] * loops[k].stride   ->  chunk_bytes
//
// A stacked pool, and a list of views with one distance between them, are a loop over the layers.
struct PlaneGroup {
  int64_t chunk_bytes = 0;
  int64_t dst_slot_stride_bytes = 0;
  int64_t src_slot_stride_bytes = 0;
  std::vector<Loop> loops;
  std::vector<PlaneAddress> planes;

  bool has_geometry_of(const PlaneGroup& other) const {
    return chunk_bytes == other.chunk_bytes && dst_slot_stride_bytes == other.dst_slot_stride_bytes &&
           src_slot_stride_bytes == other.src_slot_stride_bytes && loops == other.loops;
  }
  int64_t chunks_per_plane() const {
    int64_t chunks = 1;
    for (const Loop& loop : loops)
      chunks *= loop.size;
    return chunks;
  }
  int64_t bytes_per_entry() const {
    return chunks_per_plane() * static_cast<int64_t>(planes.size()) * chunk_bytes;
  }
};

// The bytes that one tensor of a list may touch.
struct Extent {
  const char* begin;
  const char* end;
  int32_t position;  // in its list
};

// 1-D integers; only those on the CPU may be read by the host.
struct IndexView {
  const void* data = nullptr;
  int64_t stride = 1;  // elements
  bool is_int64 = true;
  bool is_cpu = true;

  int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i * stride]
                    : static_cast<const int32_t*>(data)[i * stride];
  }
  // Of those on the CPU, once check_cpu_indices() has copied them.
  const int64_t* checked() const {
    return static_cast<const int64_t*>(data);
  }
};

// All that a backend needs to know of a call.
struct TransferArgs {
  Device dst_device;
  Device src_device;
  Device device;  // the accelerator that takes part, else the CPU

  std::vector<PlaneGroup> groups;
  std::vector<Extent> dst_extents;
  std::vector<Extent> src_extents;
  int64_t dst_slots = 0;  // the smallest of all tensors of that side
  int64_t src_slots = 0;

  IndexView dst_indices;
  IndexView src_indices;
  int64_t num_entries = 0;  // a `count` on the CPU is already applied
  IndexView count;          // on the accelerator; data is null without one

  // Copies of the indices on the CPU, which `dst_indices` and `src_indices` then name: what was checked is what
  // is used, also where a destination or another thread overwrites the caller's.
  std::unique_ptr<int64_t[]> checked_dst_indices;
  std::unique_ptr<int64_t[]> checked_src_indices;

  // Entries (of indices on the CPU) whose destination a later entry writes again; empty without any.
  std::vector<bool> overwritten;

  // The first tensor in host memory that the accelerator can't reach, such as "src[0]"; empty when it
  // reaches all. Addresses in `groups` are the accelerator's, but the host's for such tensors.
  std::string unreachable;

  Method method = Method::kAuto;
  int64_t max_blocks = 0;

  bool is_empty() const {
    return groups.empty() || num_entries == 0;
  }
  bool has_cpu_indices() const {
    return dst_indices.is_cpu && src_indices.is_cpu;
  }
  bool is_overwritten(int64_t entry) const {
    return !overwritten.empty() && overwritten[entry];
  }
  int64_t bytes_per_entry() const {
    int64_t bytes = 0;
    for (const PlaneGroup& group : groups)
      bytes += group.bytes_per_entry();
    return bytes;
  }
};

// Tells where a device finds memory that tensors call the CPU's.
class HostMemoryMap {
 public:
  virtual ~HostMemoryMap() = default;
  // The device's address of [begin, end), or null where the device can't reach it.
  virtual const char* device_address(const char* begin, const char* end) const = 0;
  // Where, strictly inside a range of host addresses, registrations meet. A copy by a DMA engine may not span
  // two of them; a kernel does not mind.
  virtual std::vector<const char*> seams(const char*, const char*) const {
    return {};
  }
};

// Checks a call completely, but for what only a device runtime can tell (reachability of host
// memory, capture state, values of device indices). Throws std::invalid_argument (ValueError)
// or std::out_of_range (IndexError) before anything has moved. An accelerator's backend gives the
// `map` of host memory that it reaches.
TransferArgs plan_transfer(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                           const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                           const std::optional<Tensor>& count, std::string_view method, int64_t max_blocks,
                           const HostMemoryMap* map = nullptr);

// The second half of plan_transfer, in slot_runs.cpp: reads the indices that are on the CPU, once, checks
// their ranges, fills `overwritten` and refuses overlap.
void check_cpu_indices(TransferArgs& args);

// Calls visit(dst_slot, src_slot) for each entry that moves, in the caller's order; indices on the CPU.
template <typename Visit>
void for_each_entry(const TransferArgs& args, int64_t begin, int64_t end, const Visit& visit) {
  const int64_t *dst = args.dst_indices.checked(), *src = args.src_indices.checked();
  for (int64_t i = begin; i < end; ++i)
    if (dst[i] >= 0 && src[i] >= 0 && !args.is_overwritten(i))
      visit(dst[i], src[i]);
}

// A maximal stretch of entries whose slots are neighbours on both sides, ascending or descending; `dst_slot`
// and `src_slot` are the lowest.
struct SlotRun {
  int64_t dst_slot;
  int64_t src_slot;
  int64_t length;
};
std::vector<SlotRun> slot_runs(const TransferArgs& args);

std::string device_name(const Device& device);
Method parse_method(std::string_view method);

}  // namespace hicache
