#include "host_memory.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

#include "backend.h"
#include "runtime.h"

namespace hicache {
namespace {

constexpr int kRegisterMapped = 0;  // ACL_HOST_REGISTER_MAPPED

struct Registration {
  size_t nbytes;
  const char* device_address;
  bool is_registered_here;  // with the driver, and undone by us
};

// By host address. Never destroyed: tensors may outlive static objects.
struct Registry {
  std::shared_mutex mutex;
  std::map<const char*, Registration> by_host;
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

void add(const char* host, const Registration& registration) {
  const std::unique_lock<std::shared_mutex> lock(registry().mutex);
  registry().by_host[host] = registration;
}

const Registration* find(const char* begin, const char* end, const char*& host) {
  const auto& known = registry().by_host;
  auto after = known.upper_bound(begin);
  if (after == known.begin())
    return nullptr;
  --after;
  host = after->first;
  return end <= host + after->second.nbytes ? &after->second : nullptr;
}

}  // namespace

void register_host_memory(const Tensor& on_device, int64_t address, int64_t nbytes) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  if (driver().host_register == nullptr)
    throw std::runtime_error("[host_memory] this CANN has no aclrtHostRegister; use kind 'memfabric'.");
  void* host = reinterpret_cast<void*>(address);
  void* device = nullptr;
  check_acl(driver().host_register(host, static_cast<uint64_t>(nbytes), kRegisterMapped, &device),
            "aclrtHostRegister");
  add(static_cast<const char*>(host), {static_cast<size_t>(nbytes), static_cast<const char*>(device), true});
}

void map_host_memory(const Tensor&, int64_t address, int64_t nbytes, int64_t device_address) {
  add(reinterpret_cast<const char*>(address),
      {static_cast<size_t>(nbytes), reinterpret_cast<const char*>(device_address), false});
}

// Waits for the device first: a transfer that still uses the memory must not lose it.
void unregister_host_memory(const Tensor& on_device, int64_t address) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const char* host = reinterpret_cast<const char*>(address);
  bool is_registered_here;
  {
    const std::unique_lock<std::shared_mutex> lock(registry().mutex);
    const auto at = registry().by_host.find(host);
    if (at == registry().by_host.end())
      throw std::invalid_argument("[host_memory] this memory was not registered here.");
    is_registered_here = at->second.is_registered_here;
    registry().by_host.erase(at);
  }
  check_acl(driver().synchronize_device(), "aclrtSynchronizeDevice");
  if (is_registered_here)
    check_acl(driver().host_unregister(const_cast<char*>(host)), "aclrtHostUnregister");
}

int64_t host_device_address(const Tensor&, int64_t address, int64_t nbytes) {
  const char* begin = reinterpret_cast<const char*>(address);
  const char* device = AscendHostMemoryMap().device_address(begin, begin + nbytes);
  if (device == nullptr)
    throw std::invalid_argument(
        "[device_view] an AI core can't reach the tensor's memory, which is pageable or only page-locked; "
        "allocate it with torch_hicache.empty_host(shape, dtype, device).");
  return reinterpret_cast<int64_t>(device);
}

const char* AscendHostMemoryMap::device_address(const char* begin, const char* end) const {
  const std::shared_lock<std::shared_mutex> lock(registry().mutex);
  const char* host;
  const Registration* registration = find(begin, end, host);
  if (registration == nullptr)
    return nullptr;
  has_translated |= registration->device_address != host;
  return registration->device_address + (begin - host);
}

HostMemory kind_of(const void* host) {
  const char* begin = static_cast<const char*>(host);
  if (AscendHostMemoryMap().device_address(begin, begin + 1) != nullptr)
    return HostMemory::kPinned;
  PointerAttributes attributes{};
  const bool is_known = driver().pointer_attributes != nullptr &&
                        driver().pointer_attributes(host, &attributes) == 0 && attributes.type == kLocationHost;
  return is_known ? HostMemory::kPinned : HostMemory::kPageable;
}

}  // namespace hicache
