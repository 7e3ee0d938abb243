#include "entries.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <limits>

namespace hicache {

Tensor empty_tensor(int64_t elements, int32_t dtype, const Device& device) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &elements, &stride, dtype, device.type, device.index, &handle));
  return Tensor(handle);
}

namespace {

// Pinned memory of torch's own allocator, which frees it only when the copy out of it has run.
Tensor empty_pinned(int64_t elements, int32_t dtype) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided_pinned(1, &elements, &stride, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor upload(const Tensor& pinned, int64_t elements, int32_t dtype, const Device& device) {
  Tensor on_device = empty_tensor(elements, dtype, device);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(on_device.get(), pinned.get(), /*non_blocking=*/1));
  return on_device;
}

template <typename Index>
void write_entries(const TransferArgs& args, Index* dst, Index* src) {
  for_each_entry(args, 0, args.num_entries, [&](int64_t dst_slot, int64_t src_slot) {
    *dst++ = static_cast<Index>(dst_slot);
    *src++ = static_cast<Index>(src_slot);
  });
}

int64_t count_entries(const TransferArgs& args) {
  int64_t count = 0;
  for_each_entry(args, 0, args.num_entries, [&](int64_t, int64_t) { ++count; });
  return count;
}

bool fits_int32(const TransferArgs& args) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return args.dst_slots <= kMax && args.src_slots <= kMax;
}

void upload_entries(const TransferArgs& args, Entries& entries) {
  const int64_t n = entries.num_entries = count_entries(args);
  const bool is_int64 = !fits_int32(args);
  if (n <= kMaxInlineEntries && !is_int64) {
    entries.inline_dst.resize(n);
    entries.inline_src.resize(n);
    write_entries(args, entries.inline_dst.data(), entries.inline_src.data());
    return;
  }
  const int32_t dtype = is_int64 ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32();
  const Tensor pinned = empty_pinned(2 * n, dtype);
  if (is_int64) {
    auto* data = static_cast<int64_t*>(pinned.data_ptr());
    write_entries(args, data, data + n);
  } else {
    auto* data = static_cast<int32_t*>(pinned.data_ptr());
    write_entries(args, data, data + n);
  }
  const Tensor on_device = upload(pinned, 2 * n, dtype, args.device);
  const char* data = static_cast<const char*>(on_device.data_ptr());
  entries.dst = {data, 1, is_int64};
  entries.src = {data + n * (is_int64 ? 8 : 4), 1, is_int64};
  entries.scratch.push_back(on_device);
}

// One index tensor on the CPU, its partner on the device.
DeviceIndices upload_side(const TransferArgs& args, const IndexView& indices, bool is_dst, Entries& entries) {
  const Tensor pinned = empty_pinned(args.num_entries, aoti_torch_dtype_int64());
  auto* slots = static_cast<int64_t*>(pinned.data_ptr());
  for (int64_t i = 0; i < args.num_entries; ++i)
    slots[i] = is_dst && args.is_overwritten(i) ? -1 : indices[i];
  entries.scratch.push_back(upload(pinned, args.num_entries, aoti_torch_dtype_int64(), args.device));
  return {entries.scratch.back().data_ptr(), 1, true};
}

DeviceIndices as_given(const IndexView& indices) {
  return {indices.data, indices.stride, indices.is_int64};
}

}  // namespace

Entries device_entries(const TransferArgs& args) {
  Entries entries;
  if (args.has_cpu_indices()) {
    upload_entries(args, entries);
    return entries;
  }
  const auto on_device = [&](const IndexView& indices, bool is_dst) {
    return indices.is_cpu ? upload_side(args, indices, is_dst, entries) : as_given(indices);
  };
  entries.num_entries = args.num_entries;
  entries.dst = on_device(args.dst_indices, /*is_dst=*/true);
  entries.src = on_device(args.src_indices, /*is_dst=*/false);
  if (args.count.data != nullptr)
    entries.count = as_given(args.count);
  return entries;
}

}  // namespace hicache
