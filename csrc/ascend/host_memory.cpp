#include "host_memory.h"

#include <mutex>
#include <set>
#include <stdexcept>

#include "../host_registrations.h"
#include "backend.h"
#include "runtime.h"

namespace hicache {
namespace {

constexpr int kRegisterMapped = 0;  // ACL_HOST_REGISTER_MAPPED

// Never destroyed: tensors may outlive static objects.
HostRegistrations& registrations() {
  static auto* instance = new HostRegistrations;
  return *instance;
}

// Of these, memory that somebody else mapped, which is not ours to undo with the driver.
class MappedByOthers {
 public:
  void add(const char* host) {
    const std::lock_guard<std::mutex> lock(mutex_);
    addresses_.insert(host);
  }
  bool remove(const char* host) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return addresses_.erase(host) != 0;
  }

 private:
  std::mutex mutex_;
  std::set<const char*> addresses_;
};

MappedByOthers& mapped_by_others() {
  static auto* instance = new MappedByOthers;
  return *instance;
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
  registrations().add(static_cast<const char*>(host), static_cast<size_t>(nbytes),
                      static_cast<const char*>(device));
}

void map_host_memory(const Tensor&, int64_t address, int64_t nbytes, int64_t device_address) {
  const char* host = reinterpret_cast<const char*>(address);
  mapped_by_others().add(host);
  registrations().add(host, static_cast<size_t>(nbytes), reinterpret_cast<const char*>(device_address));
}

// Waits for the device first: a transfer that still uses the memory must not lose it.
void unregister_host_memory(const Tensor& on_device, int64_t address) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const char* host = reinterpret_cast<const char*>(address);
  if (!registrations().remove(host))
    throw std::invalid_argument("[host_memory] this memory was not registered here.");
  const bool is_others = mapped_by_others().remove(host);
  check_acl(driver().synchronize_device(), "aclrtSynchronizeDevice");
  if (!is_others)
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
  const char* device = registrations().device_address(begin, end);
  has_translated |= device != nullptr && device != begin;
  return device;
}

std::vector<const char*> registration_seams(const char* begin, const char* end) {
  return registrations().seams(begin, end);
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
