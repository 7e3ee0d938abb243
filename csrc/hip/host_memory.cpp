// Registered host memory. Unlike on most NVIDIA machines the device's address of it is another one than the
// host's, so each pool's address is looked up, and the host's is never handed to a kernel.
#include "host_memory.h"

#include <torch/csrc/stable/accelerator.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

#include "runtime.h"

namespace hicache {
namespace {

struct Registration {
  size_t nbytes;
  const char* device_address;
};

// Registrations made here, by host address. Never destroyed: tensors may outlive static objects.
struct Registry {
  std::shared_mutex mutex;
  std::map<const char*, Registration> by_host;
};

Registry& registry() {
  static auto* instance = new Registry;
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
  const std::unique_lock<std::shared_mutex> lock(registry().mutex);
  registry().by_host[static_cast<const char*>(host)] = {static_cast<size_t>(nbytes),
                                                        static_cast<const char*>(device)};
}

// Waits for the device first: a transfer that still uses the memory must not lose it.
void unregister_host_memory(const Tensor& on_device, int64_t address) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const RelaxedCapture relaxed;
  char* host = reinterpret_cast<char*>(address);
  {
    const std::unique_lock<std::shared_mutex> lock(registry().mutex);
    if (registry().by_host.erase(host) == 0)
      throw std::invalid_argument("[host_memory] this memory was not registered here.");
  }
  check_hip(hipDeviceSynchronize(), "hipDeviceSynchronize");
  check_hip(hipHostUnregister(host), "hipHostUnregister");
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
  {
    Registry& known = registry();
    const std::shared_lock<std::shared_mutex> lock(known.mutex);
    auto after = known.by_host.upper_bound(begin);
    if (after != known.by_host.begin()) {
      const auto& [host, registration] = *--after;
      if (end <= host + registration.nbytes)
        return registration.device_address + (begin - host);
    }
  }
  // A registration by others may end inside the tensor.
  const char* first = runtime_device_address(begin);
  const char* last = runtime_device_address(end - 1);
  return first != nullptr && last == first + (end - 1 - begin) ? first : nullptr;
}

bool is_host_memory(const void* device_address) {
  {
    Registry& known = registry();
    const std::shared_lock<std::shared_mutex> lock(known.mutex);
    for (const auto& [host, registration] : known.by_host)
      if (device_address >= registration.device_address &&
          device_address < registration.device_address + registration.nbytes)
        return true;
  }
  hipPointerAttribute_t attributes{};
  if (hipPointerGetAttributes(&attributes, device_address) != hipSuccess) {
    (void)hipGetLastError();
    return false;
  }
  return attributes.type == hipMemoryTypeHost;
}

}  // namespace hicache
