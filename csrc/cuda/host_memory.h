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
};

// Where, strictly inside a range of host addresses, registrations of ours meet. A copy by the DMA engine
// may not span two of them; a kernel does not mind.
std::vector<const char*> registration_seams(const char* begin, const char* end);

// True when an address that the device uses lies in host memory (a device view).
bool is_host_memory(const void* device_address);

}  // namespace hicache
