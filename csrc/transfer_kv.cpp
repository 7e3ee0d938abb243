// The checks of a call's metadata, and the collapse of tensors to chunks and loops. The fake kernel
// in torch_hicache/ops.py raises the same texts: change both.
#include "transfer_kv.h"
#include "text.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

// What torch calls the out-of-tree device that this library serves; setup.py knows it for each backend.
#ifndef HICACHE_PRIVATE_DEVICE_NAME
#define HICACHE_PRIVATE_DEVICE_NAME "privateuseone"
#endif

namespace hicache {
namespace {

constexpr size_t kMaxTensorDims = 64;  // torch's own limit

template <typename... Parts>
[[noreturn]] void throw_value_error(const Parts&... parts) {
  throw std::invalid_argument(concat("[transfer_kv] ", parts...));
}

// c10::ScalarType in its fixed order.
const char* dtype_name(int32_t dtype) {
  static constexpr const char* kNames[] = {"uint8",
                                           "int8",
                                           "int16",
                                           "int32",
                                           "int64",
                                           "float16",
                                           "float32",
                                           "float64",
                                           "complex32",
                                           "complex64",
                                           "complex128",
                                           "bool",
                                           "qint8",
                                           "quint8",
                                           "qint32",
                                           "bfloat16",
                                           "quint4x2",
                                           "quint2x4",
                                           "bits1x8",
                                           "bits2x4",
                                           "bits4x2",
                                           "bits8",
                                           "bits16",
                                           "float8_e5m2",
                                           "float8_e4m3fn",
                                           "float8_e5m2fnuz",
                                           "float8_e4m3fnuz",
                                           "uint16",
                                           "uint32",
                                           "uint64",
                                           "uint1",
                                           "uint2",
                                           "uint3",
                                           "uint4",
                                           "uint5",
                                           "uint6",
                                           "uint7",
                                           "int1",
                                           "int2",
                                           "int3",
                                           "int4",
                                           "int5",
                                           "int6",
                                           "int7",
                                           "float8_e8m0fnu",
                                           "float4_e2m1fn_x2"};
  constexpr int32_t kCount = sizeof(kNames) / sizeof(kNames[0]);
  return dtype >= 0 && dtype < kCount ? kNames[dtype] : "another dtype";
}

bool is_quantized(int32_t dtype) {
  return (dtype >= 12 && dtype <= 14) || dtype == 16 || dtype == 17;
}

// What one tensor is, read once: every question to torch is a call across the C ABI.
struct View {
  AtenTensorHandle handle;
  int32_t dtype;
  Device device;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;  // elements

  explicit View(const Tensor& tensor) : handle(tensor.get()) {
    int64_t* size_data;
    int64_t* stride_data;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device.type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device.index));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &size_data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &stride_data));
    sizes = size_data;
    strides = stride_data;
  }
  int64_t item_bytes() const {
    return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  }
};

std::string shape_text(const int64_t* begin, const int64_t* end) {
  std::string text = "[";
  for (const int64_t* size = begin; size != end; ++size)
    text += concat(size == begin ? "" : ", ", *size);
  return text + "]";
}

std::string shape_text(const View& view) {
  return shape_text(view.sizes, view.sizes + view.dim);
}

void check_integer(const View& view, const char* name) {
  if (view.dtype != aoti_torch_dtype_int32() && view.dtype != aoti_torch_dtype_int64())
    throw_value_error(name, " must be int32 or int64, got ", dtype_name(view.dtype), ".");
}

void check_indices(const View& view, const char* name) {
  check_integer(view, name);
  if (view.dim != 1)
    throw_value_error(name, " must be 1-D, got shape ", shape_text(view), ".");
}

IndexView index_view(const View& view) {
  IndexView indices;
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(view.handle, &indices.data));
  indices.stride = view.dim == 1 ? view.strides[0] : 1;
  indices.is_int64 = view.dtype == aoti_torch_dtype_int64();
  indices.is_cpu = view.device.is_cpu();
  return indices;
}

Device list_device(const std::vector<View>& list, const char* name) {
  for (size_t i = 1; i < list.size(); ++i)
    if (list[i].device != list[0].device)
      throw_value_error("all tensors of ", name, " must be on one device, got ", device_name(list[0].device),
                        " (", name, "[0]) and ", device_name(list[i].device), " (", name, "[", i, "]).");
  return list.empty() ? Device{} : list[0].device;
}

void check_devices(TransferArgs& args, const View& dst_indices, const View& src_indices, bool has_planes) {
  if (!args.dst_device.is_cpu() && !args.src_device.is_cpu() && args.dst_device != args.src_device)
    throw_value_error("dst and src may be on at most one accelerator, got ", device_name(args.dst_device),
                      " (dst) and ", device_name(args.src_device), " (src).");
  args.device = args.dst_device.is_cpu() ? args.src_device : args.dst_device;
  if (!has_planes)  // no pool says where the call belongs: the indices do
    args.device = dst_indices.device.is_cpu() ? src_indices.device : dst_indices.device;
  const auto check = [&](const View& view, const char* name) {
    if (view.device.is_cpu() || view.device == args.device)
      return;
    if (args.device.is_cpu())
      throw_value_error(name, " must be on the CPU when both pools are, got ", device_name(view.device),
                        " (the pools are on cpu).");
    throw_value_error(name, " must be on the CPU or on ", device_name(args.device), ", got ",
                      device_name(view.device), ".");
  };
  check(dst_indices, "dst_indices");
  check(src_indices, "src_indices");
}

// The dimensions before slot_dim are planes, those behind it the row.
int64_t resolve_slot_dim(const View& view, int64_t slot_dim, const char* name, size_t position) {
  const int64_t resolved = slot_dim < 0 ? slot_dim + view.dim : slot_dim;
  if (resolved < 0 || resolved >= view.dim)
    throw_value_error("slot_dim ", slot_dim, " is out of range for ", name, "[", position, "] of shape ",
                      shape_text(view), ".");
  return resolved;
}

// Sorted by stride, each dimension must step over all that lie inside it. Some views that interleave
// without meeting fail this too; nobody stores a pool that way.
bool elements_share_memory(const View& view) {
  std::array<std::pair<int64_t, int64_t>, kMaxTensorDims> dims;  // (stride, size)
  auto end = dims.begin();
  for (int64_t i = view.dim; i-- > 0;) {
    if (view.sizes[i] == 0)
      return false;
    if (view.sizes[i] > 1)
      *end++ = {view.strides[i], view.sizes[i]};
  }
  std::sort(dims.begin(), end);
  int64_t reach = 0;  // offset of the last element of the dimensions so far
  for (auto dim = dims.begin(); dim != end; ++dim) {
    if (dim->first <= reach)
      return true;
    reach += (dim->second - 1) * dim->first;
  }
  return false;
}

// torch's stable ABI has no getter for requires_grad. An alias of a tensor that requires grad is not a
// leaf, one of any other tensor is. Only asked in grad mode, which serving code does not run in.
bool requires_grad(const View& view) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(view.handle, &handle));
  StableIValue stack[1] = {torch::stable::detail::from(handle)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::alias", "", stack, TORCH_ABI_VERSION));
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_leaf", "", stack, TORCH_ABI_VERSION));
  return !torch::stable::detail::to<bool>(stack[0]);
}

// Floating point and complex: asked by what is neither, so that a float of a later torch counts.
bool can_require_grad(int32_t dtype) {
  const bool is_integer = dtype <= 4 || dtype == 11 || (dtype >= 27 && dtype <= 43);
  const bool is_bits = dtype >= 18 && dtype <= 22;
  return !is_integer && !is_bits && !is_quantized(dtype);
}

void check_pair(const View& dst, const View& src, int64_t slot_dim, size_t position) {
  for (const auto& [view, name] : {std::pair(&dst, "dst"), std::pair(&src, "src")})
    if (is_quantized(view->dtype))
      throw_value_error(name, "[", position, "] is quantized (", dtype_name(view->dtype),
                        "); pass its integer representation.");
  if (dst.dtype != src.dtype)
    throw_value_error("dst[", position, "] and src[", position, "] must have the same dtype, got ",
                      dtype_name(dst.dtype), " and ", dtype_name(src.dtype), ".");
  const int64_t dst_dim = resolve_slot_dim(dst, slot_dim, "dst", position);
  const int64_t src_dim = resolve_slot_dim(src, slot_dim, "src", position);
  const auto refuse = [&](const char* what, const std::string& dst_sizes, const std::string& src_sizes) {
    throw_value_error("dst[", position, "] and src[", position, "] must have the same ", what,
                      " slot_dim=", slot_dim, "), got ", dst_sizes, " and ", src_sizes, ".");
  };
  if (!std::equal(dst.sizes, dst.sizes + dst_dim, src.sizes, src.sizes + src_dim))
    refuse("plane dimensions (before", shape_text(dst.sizes, dst.sizes + dst_dim),
           shape_text(src.sizes, src.sizes + src_dim));
  if (!std::equal(dst.sizes + dst_dim + 1, dst.sizes + dst.dim, src.sizes + src_dim + 1, src.sizes + src.dim))
    refuse("row dimensions (after", shape_text(dst.sizes + dst_dim + 1, dst.sizes + dst.dim),
           shape_text(src.sizes + src_dim + 1, src.sizes + src.dim));
  if (elements_share_memory(dst))
    throw_value_error("dst[", position,
                      "] has elements that share memory (an expanded view?); a destination must not.");
}

Extent extent_of(const View& view, const char* base, size_t position) {
  int64_t last = 0;
  for (int64_t i = 0; i < view.dim; ++i)
    last += (view.sizes[i] - 1) * view.strides[i];
  return {base, base + (last + 1) * view.item_bytes(), static_cast<int32_t>(position)};
}

// Joins neighbouring dimensions where both sides agree: what is contiguous on both becomes the chunk.
PlaneGroup collapse(const View& dst, const View& src, int64_t slot_dim) {
  PlaneGroup group;
  const int64_t item_bytes = dst.item_bytes();
  const int64_t dst_dim = slot_dim < 0 ? slot_dim + dst.dim : slot_dim;
  group.chunk_bytes = item_bytes;
  group.dst_slot_stride_bytes = dst.strides[dst_dim] * item_bytes;
  group.src_slot_stride_bytes = src.strides[dst_dim] * item_bytes;
  std::array<Loop, kMaxTensorDims> dims;  // both sides have them: plane and row dimensions are equal
  auto end = dims.begin();
  for (int64_t i = 0; i < dst.dim; ++i)
    if (i != dst_dim && dst.sizes[i] != 1)
      *end++ = {dst.sizes[i], dst.strides[i] * item_bytes, src.strides[i] * item_bytes};
  std::sort(dims.begin(), end, [](const Loop& a, const Loop& b) {
    return std::pair(a.dst_stride_bytes, a.src_stride_bytes) <
           std::pair(b.dst_stride_bytes, b.src_stride_bytes);
  });
  std::vector<Loop>& loops = group.loops;  // fastest first while it grows
  for (auto at = dims.begin(); at != end; ++at) {
    const Loop& dim = *at;
    if (loops.empty() && dim.dst_stride_bytes == group.chunk_bytes && dim.src_stride_bytes == group.chunk_bytes)
      group.chunk_bytes *= dim.size;
    else if (!loops.empty() && dim.dst_stride_bytes == loops.back().dst_stride_bytes * loops.back().size &&
             dim.src_stride_bytes == loops.back().src_stride_bytes * loops.back().size)
      loops.back().size *= dim.size;
    else
      loops.push_back(dim);
  }
  std::reverse(loops.begin(), loops.end());
  return group;
}

// Whether two planes of a group, `distance` bytes apart, have a byte in common. A plane's own elements do not
// meet, so going from the longest stride to the shortest only two multiples of each can lead near enough.
bool planes_meet(const std::vector<Loop>& dims, size_t next, int64_t distance, int64_t chunk_bytes) {
  if (next == dims.size())
    return -chunk_bytes < distance && distance < chunk_bytes;
  const int64_t stride = dims[next].dst_stride_bytes, steps = distance / stride;
  for (int64_t i = steps - 1; i <= steps + 1; ++i)
    if (-dims[next].size < i && i < dims[next].size &&
        planes_meet(dims, next + 1, distance - i * stride, chunk_bytes))
      return true;
  return false;
}

// Destination planes that share bytes would race for them. Equal addresses are found in any list, shifted
// views among planes of one geometry; the rest is the caller's to get right.
void check_distinct_addresses(const std::vector<Extent>& dst_extents) {
  std::vector<std::pair<const char*, int32_t>> planes;
  for (const Extent& extent : dst_extents)
    planes.push_back({extent.begin, extent.position});
  std::sort(planes.begin(), planes.end());
  for (size_t i = 1; i < planes.size(); ++i)
    if (planes[i].first == planes[i - 1].first)
      throw_value_error("dst[", planes[i - 1].second, "] and dst[", planes[i].second,
                        "] share memory; a destination must be named once.");
}

std::vector<Loop> dims_of_a_plane(const PlaneGroup& group, size_t first_loop, int64_t dst_slots) {
  std::vector<Loop> dims(group.loops.begin() + first_loop, group.loops.end());
  if (dst_slots > 1)
    dims.push_back({dst_slots, group.dst_slot_stride_bytes, 0});
  std::sort(dims.begin(), dims.end(),
            [](const Loop& a, const Loop& b) { return a.dst_stride_bytes > b.dst_stride_bytes; });
  return dims;
}

void check_planes_apart(const PlaneGroup& group, bool is_joined, int64_t dst_slots) {
  const auto refuse = [] {
    throw_value_error("two tensors of dst share memory (shifted views?); a destination must be named once.");
  };
  if (is_joined) {
    const std::vector<Loop> dims = dims_of_a_plane(group, 1, dst_slots);
    const Loop& planes = group.loops[0];
    for (int64_t i = 1; i < planes.size; ++i)
      if (planes_meet(dims, 0, i * planes.dst_stride_bytes, group.chunk_bytes))
        refuse();
    return;
  }
  if (group.planes.size() < 2)
    return;
  const std::vector<Loop> dims = dims_of_a_plane(group, 0, dst_slots);
  int64_t reach = group.chunk_bytes;
  for (const Loop& dim : dims)
    reach += (dim.size - 1) * dim.dst_stride_bytes;
  std::vector<const char*> begins;
  for (const PlaneAddress& plane : group.planes)
    begins.push_back(plane.dst);
  std::sort(begins.begin(), begins.end());
  for (size_t i = 0; i < begins.size(); ++i)
    for (size_t k = i + 1; k < begins.size() && begins[k] - begins[i] < reach; ++k)
      if (planes_meet(dims, 0, begins[k] - begins[i], group.chunk_bytes))
        refuse();
}

// Planes with one distance between neighbours on each side are a loop: a list of views of one pool
// costs a backend no more than a stack. True where that was so.
bool join_planes(PlaneGroup& group) {
  if (group.planes.size() < 2)
    return false;
  const int64_t dst_step = group.planes[1].dst - group.planes[0].dst;
  const int64_t src_step = group.planes[1].src - group.planes[0].src;
  for (size_t i = 2; i < group.planes.size(); ++i)
    if (group.planes[i].dst - group.planes[i - 1].dst != dst_step ||
        group.planes[i].src - group.planes[i - 1].src != src_step)
      return false;
  group.loops.insert(group.loops.begin(), {static_cast<int64_t>(group.planes.size()), dst_step, src_step});
  group.planes.resize(1);
  return true;
}

// The accelerator's address of a tensor's first byte; the host's own where it has none.
const char* reachable_address(TransferArgs& args, const View& view, const Extent& extent, const char* name,
                              const HostMemoryMap* map) {
  if (map == nullptr || !view.device.is_cpu())
    return extent.begin;
  const char* address = map->device_address(extent.begin, extent.end);
  if (address != nullptr)
    return address;
  if (args.unreachable.empty())
    args.unreachable = std::string(name) + "[" + std::to_string(extent.position) + "]";
  return extent.begin;
}

void add_pair(TransferArgs& args, const View& dst, const View& src, int64_t slot_dim, size_t position,
              const HostMemoryMap* map) {
  const int64_t slot_dim_of_both = slot_dim < 0 ? slot_dim + dst.dim : slot_dim;
  args.dst_slots = std::min(args.dst_slots, dst.sizes[slot_dim_of_both]);
  args.src_slots = std::min(args.src_slots, src.sizes[slot_dim_of_both]);
  const auto is_zero = [](int64_t size) { return size == 0; };
  if (std::any_of(dst.sizes, dst.sizes + dst.dim, is_zero) ||
      std::any_of(src.sizes, src.sizes + src.dim, is_zero))
    return;  // a row of no bytes, or no slot that an index could name
  void* dst_data;
  const void* src_data;
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(dst.handle, &dst_data));
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(src.handle, &src_data));
  for (const auto& [data, name] : {std::pair<const void*, const char*>(dst_data, "dst"), {src_data, "src"}})
    if (data == nullptr)
      throw_value_error(name, "[", position, "] has no memory (a storage resized to 0?).");
  args.dst_extents.push_back(extent_of(dst, static_cast<char*>(dst_data), position));
  args.src_extents.push_back(extent_of(src, static_cast<const char*>(src_data), position));
  const PlaneAddress plane{const_cast<char*>(reachable_address(args, dst, args.dst_extents.back(), "dst", map)),
                           reachable_address(args, src, args.src_extents.back(), "src", map)};
  PlaneGroup group = collapse(dst, src, slot_dim);
  const auto same = std::find_if(args.groups.begin(), args.groups.end(),
                                 [&](const PlaneGroup& other) { return group.has_geometry_of(other); });
  if (same != args.groups.end()) {
    same->planes.push_back(plane);
  } else {
    group.planes.push_back(plane);
    args.groups.push_back(std::move(group));
  }
}

// `count` shortens the work: on the CPU at once, on the accelerator when the kernel runs.
void apply_count(TransferArgs& args, const View& count) {
  check_integer(count, "count");
  int64_t elements = 1;
  for (int64_t i = 0; i < count.dim; ++i)
    elements *= count.sizes[i];
  if (elements != 1)
    throw_value_error("count must have one element, got shape ", shape_text(count), ".");
  const bool on_device = !args.dst_indices.is_cpu && !args.src_indices.is_cpu;
  if (on_device && count.device != args.device)
    throw_value_error("count must be on ", device_name(args.device), ", where both index tensors are, got ",
                      device_name(count.device), ".");
  if (!on_device && !count.device.is_cpu())
    throw_value_error("count must be on the CPU unless both index tensors are on the accelerator, got ",
                      device_name(count.device), ".");
  args.count = index_view(count);
  if (on_device)
    return;
  const int64_t value = args.count[0];
  if (value < 0 || value > args.num_entries)
    throw_value_error("count must be between 0 and ", args.num_entries, ", the number of indices, got ", value,
                      ".");
  args.num_entries = value;
  args.count.data = nullptr;
}

void check_method(const TransferArgs& args) {
  if (args.method == Method::kAuto || args.method == Method::kKernel)
    return;
  const char* name = args.method == Method::kStaged ? "staged" : "copy_engine";
  if (args.device.is_cpu())
    throw_value_error("method '", name,
                      "' needs an accelerator, but both pools are on cpu; use 'auto' or 'kernel'.");
}

}  // namespace

std::string device_name(const Device& device) {
  switch (device.type) {
    case 0:
      return "cpu";
    case 1:
      return concat("cuda:", device.index);
    case 6:
      return concat("hip:", device.index);
    case 20:
      return concat(HICACHE_PRIVATE_DEVICE_NAME ":", device.index);
    default:
      return concat("device type ", device.type, ":", device.index);
  }
}

Method parse_method(std::string_view method) {
  if (method == "auto")
    return Method::kAuto;
  if (method == "kernel")
    return Method::kKernel;
  if (method == "copy_engine")
    return Method::kCopyEngine;
  if (method == "staged")
    return Method::kStaged;
  throw_value_error("method must be 'auto', 'kernel', 'copy_engine' or 'staged', got '", method, "'.");
}

TransferArgs plan_transfer(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                           const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                           const std::optional<Tensor>& count, std::string_view method, int64_t max_blocks,
                           const HostMemoryMap* map) {
  TransferArgs args;
  args.method = parse_method(method);
  args.max_blocks = max_blocks;
  if (max_blocks < 0)
    throw_value_error("max_blocks must be 0 or more, got ", max_blocks, ".");
  if (dst.size() != src.size())
    throw_value_error("dst and src must have the same number of tensors, got ", dst.size(), " and ", src.size(),
                      ".");
  // A schema's Tensor takes None from Python.
  if (!dst_indices.defined() || !src_indices.defined())
    throw_value_error(dst_indices.defined() ? "src" : "dst", "_indices must be a tensor, got None.");
  const View dst_index(dst_indices), src_index(src_indices);
  check_indices(dst_index, "dst_indices");
  check_indices(src_index, "src_indices");
  if (dst_index.sizes[0] != src_index.sizes[0])
    throw_value_error("dst_indices and src_indices must have the same length, got ", dst_index.sizes[0],
                      " and ", src_index.sizes[0], ".");

  const std::vector<View> dst_views(dst.begin(), dst.end()), src_views(src.begin(), src.end());
  args.dst_device = list_device(dst_views, "dst");
  args.src_device = list_device(src_views, "src");
  check_devices(args, dst_index, src_index, !dst.empty());
  for (size_t i = 0; i < dst.size(); ++i)
    check_pair(dst_views[i], src_views[i], slot_dim, i);
  if (aoti_torch_grad_mode_is_enabled())
    for (size_t i = 0; i < dst.size(); ++i)
      if (can_require_grad(dst_views[i].dtype) && requires_grad(dst_views[i]))
        throw_value_error("dst[", i,
                          "] requires grad and transfer_kv has no derivative; call it under "
                          "torch.no_grad() or detach the pool.");
  args.dst_indices = index_view(dst_index);
  args.src_indices = index_view(src_index);
  args.num_entries = dst_index.sizes[0];
  if (count.has_value())
    apply_count(args, View(*count));
  check_method(args);

  args.dst_slots = args.src_slots = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < dst.size(); ++i)
    add_pair(args, dst_views[i], src_views[i], slot_dim, i, map);
  check_distinct_addresses(args.dst_extents);
  for (PlaneGroup& group : args.groups)
    check_planes_apart(group, join_planes(group), args.dst_slots);
  check_cpu_indices(args);
  return args;
}

}  // namespace hicache
