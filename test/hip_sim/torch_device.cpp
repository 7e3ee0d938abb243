// The simulated GPU as a device of torch: what a vendor's package adds, in the least that the op's tests need.
// Copies between contiguous tensors are queued; every other operation waits and lets the CPU work on the
// GPU's own bytes.
//
// HIP_SIM_KEY is the dispatch key and the device type: PrivateUse1, CUDA as on a torch for ROCm, or HIP,
// torch's own type for such GPUs; HIP_SIM_IS_PRIVATE and HIP_SIM_IS_HIP say whether it is the first or the
// last.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/HIPHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <hip/hip_runtime_api.h>

#include <list>
#include <map>
#include <mutex>
#include <vector>

extern "C" {
void hip_sim_unlock();
void hip_sim_lock();
int hip_sim_has_happened(hipEvent_t event);
}

#if HIP_SIM_IS_PRIVATE
#define HIP_SIM_HOOKS at::PrivateUse1HooksInterface
#elif HIP_SIM_IS_HIP
#define HIP_SIM_HOOKS at::HIPHooksInterface
#else
#define HIP_SIM_HOOKS at::CUDAHooksInterface
#endif

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::HIP_SIM_KEY;
constexpr c10::DispatchKey kKey = c10::DispatchKey::HIP_SIM_KEY;
constexpr int kStreams = 8;

void check(hipError_t status) {
  TORCH_CHECK(status == hipSuccess, "hip_sim: ", hipGetErrorName(status));
}

hipStream_t native_stream(c10::StreamId id) {
  static auto* streams = [] {
    auto* created = new std::vector<hipStream_t>(kStreams);
    for (hipStream_t& stream : *created)
      check(hipStreamCreateWithFlags(&stream, hipStreamNonBlocking));
    return created;
  }();
  return (*streams)[id];
}

thread_local c10::StreamId current_stream_id = 0;

hipStream_t current() {
  return native_stream(current_stream_id);
}

// --- Allocators ----------------------------------------------------------------------------------

// Freed in the order of the stream that is current then.
class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes > 0 && hipMalloc(&data, nbytes) != hipSuccess) {
      (void)hipGetLastError();
      TORCH_CHECK_WITH(OutOfMemoryError, false, "hip_sim: no ", nbytes, " bytes of device memory");
    }
    int device = 0;
    check(hipGetDevice(&device));
    return {data, data, &free, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    check(hipMemcpyAsync(dst, src, nbytes, hipMemcpyDeviceToDevice, current()));
  }

 private:
  static void free(void* data) {
    if (data != nullptr)
      (void)hipFreeAsync(data, current());
  }
};

// Used again when the work that was queued on the current stream has run. Never given back: that would wait for
// the whole device.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = take_idle(nbytes);
    if (data == nullptr)
      check(hipHostMalloc(&data, nbytes == 0 ? 1 : nbytes, 0));
    sizes()[data] = nbytes;
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    std::memcpy(dst, src, nbytes);
  }

 private:
  struct Waiting {
    void* data;
    hipEvent_t event;
  };
  static std::list<Waiting>& waiting() {
    static auto* list = new std::list<Waiting>;
    return *list;
  }
  static void free(void* data) {
    hipEvent_t event = nullptr;
    (void)hipEventCreateWithFlags(&event, 0);
    (void)hipEventRecord(event, current());
    waiting().push_back({data, event});
  }
  static std::map<void*, size_t>& sizes() {
    static auto* map = new std::map<void*, size_t>;
    return *map;
  }
  static void* take_idle(size_t nbytes) {
    for (auto block = waiting().begin(); block != waiting().end(); ++block)
      if (sizes()[block->data] == nbytes && hip_sim_has_happened(block->event) != 0) {
        void* const data = block->data;
        waiting().erase(block);
        return data;
      }
    return nullptr;
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// --- The guard, streams and events ---------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    int device = 0;
    check(hipGetDevice(&device));
    return {kType, static_cast<c10::DeviceIndex>(device)};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index())
      check(hipSetDevice(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    (void)hipSetDevice(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream_id);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<int> next{0};
    return stream(device, 1 + next++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream_now) const override {
    return stream(stream_now.device(), std::exchange(current_stream_id, stream_now.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream_now) const override {
    return native_stream(stream_now.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    return hipGetDeviceCount(&count) == hipSuccess ? static_cast<c10::DeviceIndex>(count) : 0;
  }
  bool queryStream(const c10::Stream& stream_now) const override {
    return hipStreamQuery(native_stream(stream_now.id())) == hipSuccess;
  }
  void synchronizeStream(const c10::Stream& stream_now) const override {
    check(hipStreamSynchronize(native_stream(stream_now.id())));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    check(hipDeviceSynchronize());
  }
  void record(void** event, const c10::Stream& stream_now, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr)
      check(hipEventCreateWithFlags(reinterpret_cast<hipEvent_t*>(event), 0));
    check(hipEventRecord(static_cast<hipEvent_t>(*event), native_stream(stream_now.id())));
  }
  void block(void* event, const c10::Stream& stream_now) const override {
    check(hipStreamWaitEvent(native_stream(stream_now.id()), static_cast<hipEvent_t>(event), 0));
  }
  bool queryEvent(void* event) const override {
    return hipEventQuery(static_cast<hipEvent_t>(event)) == hipSuccess;
  }
  void synchronizeEvent(void* event) const override {
    check(hipEventSynchronize(static_cast<hipEvent_t>(event)));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    (void)hipEventDestroy(static_cast<hipEvent_t>(event));
  }

 private:
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : Guard().getDevice(), id);
  }
};

C10_REGISTER_GUARD_IMPL(HIP_SIM_KEY, Guard)

// PrivateUse1 has hooks of its own; for the other keys torch takes those that are registered when it starts.
struct Hooks final : HIP_SIM_HOOKS {
#if HIP_SIM_IS_PRIVATE
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator().clone();
  }
#elif HIP_SIM_IS_HIP
  explicit Hooks(at::HIPHooksArgs) {}
  bool hasHIP() const override {
    return true;
  }
#else
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override {
    return true;
  }
#endif
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return Guard().deviceCount() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return Guard().deviceCount();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return Guard().getDevice().index();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check(hipSetDevice(device));
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return {kType, 0};
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool isPinnedPtr(const void* data) const override {
    hipPointerAttribute_t attributes{};
    const bool pinned =
        hipPointerGetAttributes(&attributes, data) == hipSuccess && attributes.type == hipMemoryTypeHost;
    (void)hipGetLastError();
    return pinned;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
#if HIP_SIM_IS_HIP
using at::HIPHooksRegistry;
using at::RegistererHIPHooksRegistry;
C10_REGISTER_CLASS(HIPHooksRegistry, HIPHooks, Hooks)
#elif !HIP_SIM_IS_PRIVATE
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
#endif

const bool is_registered = [] {
  c10::SetAllocator(kType, &device_allocator);
#if HIP_SIM_IS_PRIVATE
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
  return true;
}();

// --- Operators -----------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> memory_format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)).has_index() ? *device : Guard().getDevice());
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)).has_index() ? *device : Guard().getDevice());
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}

// The same bytes, for the CPU while the memory is unlocked.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu())
    return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()));
}

// at::copy_ hands non-blocking copies here too.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0)
    return dst;
  if (self.dtype() == dst.dtype() && self.is_contiguous() && dst.is_contiguous() &&
      self.sizes() == dst.sizes()) {
    check(hipMemcpyAsync(dst.data_ptr(), self.data_ptr(), self.nbytes(), hipMemcpyDefault, current()));
    if (!non_blocking)
      check(hipStreamSynchronize(current()));
    return dst;
  }
  check(hipDeviceSynchronize());
  // A mapped host tensor is out of the CPU's reach while the GPU's memory is not.
  const at::Tensor source = self.device().is_cpu() ? self.contiguous() : self;
  const at::Tensor staged = self.device().is_cpu() ? at::empty_like(source).copy_(source) : source;
  if (dst.device().is_cpu()) {
    hip_sim_unlock();
    const at::Tensor copy = as_cpu(self).clone();
    hip_sim_lock();
    dst.copy_(copy);
    return dst;
  }
  hip_sim_unlock();
  as_cpu(dst).copy_(as_cpu(staged));
  hip_sim_lock();
  return dst;
}

#if !HIP_SIM_IS_PRIVATE
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  copy_from(source.expand_as(self), self, non_blocking);
  return self;
}
#endif

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.numel() == 0)
    dst.resize_(self.sizes());
  return dst.copy_(self);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  const size_t nbytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize());
  if (self.storage().nbytes() < nbytes) {
    self.storage().unsafeGetStorageImpl()->set_data_ptr(device_allocator.allocate(nbytes));
    self.storage().unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

TORCH_LIBRARY_IMPL(aten, HIP_SIM_KEY, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
#if !HIP_SIM_IS_PRIVATE
  m.impl("copy_", copy);
#endif
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, HIP_SIM_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

}  // namespace
