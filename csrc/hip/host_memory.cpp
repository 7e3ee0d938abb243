// Registered host memory. Unlike on most NVIDIA machines the device's address of it is another one than the
// host's, so each pool's address is looked up, and the host's is never handed to a kernel.
#include "host_memory.h"

#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>

#include "../host_registrations.h"
#include "runtime.h"

namespace hicache {
namespace {

// Never destroyed: tensors may outlive static objects.
HostRegistrations& registrations() {
  static auto* instance = new HostRegistrations;
  return *instance;
}

bool is_known_as_host_memory(const void* address) {
  hipPointerAttribute_t attributes{};
  if (hipPointerGetAttributes(&attributes, address) != hipSuccess) {
    (void)hipGetLastError();
    return false;
  }
  return attributes.type == hipMemoryTypeHost || attributes.type == hipMemoryTypeManaged;
}

// Null where the runtime does not know `address`, which may lie inside an allocation, as memory of the host.
const char* runtime_device_address(const char* address) {
  if (!is_known_as_host_memory(address))
    return nullptr;
  void* device = nullptr;
  if (hipHostGetDevicePointer(&device, const_cast<char*>(address), 0) != hipSuccess) {
    (void)hipGetLastError();
    return nullptr;
  }
  return static_cast<const char*>(device);
}

}  // namespace

void register_host_memory(const Tensor& on_device, int64_t address, int64_t nbytes) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const RelaxedCapture relaxed;
  void* host = reinterpret_cast<void*>(address);
  check_hip(hipHostRegister(host, nbytes, hipHostRegisterPortable | hipHostRegisterMapped), "hipHostRegister");
  void* device = nullptr;
  const hipError_t mapped = hipHostGetDevicePointer(&device, host, 0);
  if (mapped != hipSuccess)
    (void)hipHostUnregister(host);
  check_hip(mapped, "hipHostGetDevicePointer");
  registrations().add(static_cast<const char*>(host), static_cast<size_t>(nbytes),
                      static_cast<const char*>(device));
}

// Waits for the device first: a transfer that still uses the memory must not lose it. Where that is not
// possible (while a stream captures) the memory stays registered, and the call may be made again.
void unregister_host_memory(const Tensor& on_device, int64_t address) {
  const int32_t device_index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const RelaxedCapture relaxed;
  char* host = reinterpret_cast<char*>(address);
  if (registrations().device_address(host, host + 1) == nullptr)
    throw std::invalid_argument("[host_memory] this memory was not registered here.");
  if (is_capturing(current_stream(device_index)))  // waiting would end the capture
    throw std::runtime_error("[host_memory] memory can't be unregistered while the current stream captures.");
  check_hip(hipDeviceSynchronize(), "hipDeviceSynchronize");
  check_hip(hipHostUnregister(host), "hipHostUnregister");
  registrations().remove(host);
}

int64_t host_device_address(const Tensor& on_device, int64_t address, int64_t nbytes) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const char* begin = reinterpret_cast<const char*>(address);
  const char* device = HipHostMemoryMap().device_address(begin, begin + nbytes);
  if (device == nullptr)
    throw std::invalid_argument(
        "[device_view] the tensor is pageable host memory, which the device can't reach; allocate it with "
        "torch_hicache.empty_host(shape, dtype, device).");
  return reinterpret_cast<int64_t>(device);
}

const char* HipHostMemoryMap::device_address(const char* begin, const char* end) const {
  if (const char* device = registrations().device_address(begin, end))
    return device;
  // A registration by others may end inside the tensor.
  const char* first = runtime_device_address(begin);
  const char* last = runtime_device_address(end - 1);
  return first != nullptr && last == first + (end - 1 - begin) ? first : nullptr;
}

std::vector<const char*> HipHostMemoryMap::seams(const char* begin, const char* end) const {
  return registrations().seams(begin, end);
}

bool is_host_memory(const void* device_address) {
  if (registrations().holds_device_address(static_cast<const char*>(device_address)))
    return true;
  hipPointerAttribute_t attributes{};
  if (hipPointerGetAttributes(&attributes, device_address) != hipSuccess) {
    (void)hipGetLastError();
    return false;
  }
  return attributes.type == hipMemoryTypeHost;
}

}  // namespace hicache
