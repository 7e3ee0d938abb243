// Brings the entries of a call to the device: as given, or uploaded from the CPU. Host code that CUDA and HIP
// share.
//
// The including file supplies, from its vendor's folder: GpuStream, Upload.
#pragma once

#include <cstdint>
#include <limits>

#include "entries.h"

namespace hicache {

template <typename Index>
void write_entries(const TransferArgs& args, Index* dst, Index* src) {
  for_each_entry(args, 0, args.num_entries, [&](int64_t dst_slot, int64_t src_slot) {
    *dst++ = static_cast<Index>(dst_slot);
    *src++ = static_cast<Index>(src_slot);
  });
}

inline int64_t count_entries(const TransferArgs& args) {
  int64_t count = 0;
  for_each_entry(args, 0, args.num_entries, [&](int64_t, int64_t) { ++count; });
  return count;
}

inline bool fits_int32(const TransferArgs& args) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return args.dst_slots <= kMax && args.src_slots <= kMax;
}

inline void upload_entries(const TransferArgs& args, Entries& entries, GpuStream stream) {
  const int64_t n = entries.num_entries = count_entries(args);
  const bool is_int64 = !fits_int32(args);
  if (n <= kMaxInlineEntries && !is_int64) {
    entries.inline_dst.resize(n);
    entries.inline_src.resize(n);
    write_entries(args, entries.inline_dst.data(), entries.inline_src.data());
    return;
  }
  const int64_t side_bytes = (n * (is_int64 ? 8 : 4) + 15) / 16 * 16;
  Upload upload(2 * side_bytes);
  char *dst = upload.data(), *src = dst + side_bytes;
  if (is_int64)
    write_entries(args, reinterpret_cast<int64_t*>(dst), reinterpret_cast<int64_t*>(src));
  else
    write_entries(args, reinterpret_cast<int32_t*>(dst), reinterpret_cast<int32_t*>(src));
  entries.scratch.push_back(upload.to_device(args.device, stream));
  const char* data = static_cast<const char*>(entries.scratch.back().data_ptr());
  entries.dst = {data, 1, is_int64};
  entries.src = {data + side_bytes, 1, is_int64};
}

// One index tensor on the CPU, its partner on the device.
inline DeviceIndices upload_side(const TransferArgs& args, const IndexView& indices, bool is_dst,
                                 Entries& entries, GpuStream stream) {
  Upload upload(args.num_entries * static_cast<int64_t>(sizeof(int64_t)));
  auto* slots = reinterpret_cast<int64_t*>(upload.data());
  for (int64_t i = 0; i < args.num_entries; ++i)
    slots[i] = is_dst && args.is_overwritten(i) ? -1 : indices[i];
  entries.scratch.push_back(upload.to_device(args.device, stream));
  return {entries.scratch.back().data_ptr(), 1, true};
}

inline DeviceIndices as_given(const IndexView& indices) {
  return {indices.data, indices.stride, indices.is_int64};
}

// Uploads what is on the CPU without waiting for the stream.
inline Entries bring_entries(const TransferArgs& args, GpuStream stream) {
  Entries entries;
  if (args.has_cpu_indices()) {
    upload_entries(args, entries, stream);
    return entries;
  }
  const auto on_device = [&](const IndexView& indices, bool is_dst) {
    return indices.is_cpu ? upload_side(args, indices, is_dst, entries, stream) : as_given(indices);
  };
  entries.num_entries = args.num_entries;
  entries.dst = on_device(args.dst_indices, /*is_dst=*/true);
  entries.src = on_device(args.src_indices, /*is_dst=*/false);
  if (args.count.data != nullptr)
    entries.count = as_given(args.count);
  return entries;
}

}  // namespace hicache
