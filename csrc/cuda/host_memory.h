// Which host memory the device reaches, and at which address.
#pragma once

#include <vector>

#include "../transfer_kv.h"

namespace hicache {

// Memory that this library registered, then whatever the runtime knows (torch's pinned tensors, other
// libraries' registrations). A range may lie in several registrations of ours.
class CudaHostMemoryMap : public HostMemoryMap {
 public:
  const char* device_address(const char* begin, const char* end) const override;
  std::vector<const char*> seams(const char* begin, const char* end) const override;
};

// True when an address that the device uses lies in host memory (a device view).
bool is_host_memory(const void* device_address);

}  // namespace hicache
