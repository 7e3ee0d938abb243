// Which host memory the device reaches, and at which address.
#pragma once

#include <vector>

#include "../transfer_kv.h"

namespace hicache {

// Memory that this library registered, then whatever the runtime knows (torch's pinned tensors, other
// libraries' registrations).
class HipHostMemoryMap : public HostMemoryMap {
 public:
  const char* device_address(const char* begin, const char* end) const override;
  std::vector<const char*> seams(const char* begin, const char* end) const override;
};

// True when an address that the device uses lies in host memory (a device view).
bool is_host_memory(const void* device_address);

// The ops of these names, for library.cpp.
void register_host_memory(const Tensor& on_device, int64_t address, int64_t nbytes);
void unregister_host_memory(const Tensor& on_device, int64_t address);
int64_t host_device_address(const Tensor& on_device, int64_t address, int64_t nbytes);

}  // namespace hicache
