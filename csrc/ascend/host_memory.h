// Which host memory an AI core reaches, and at which address: registered with the driver, or mapped by
// Memfabric. Memory that is only page-locked has no such address.
#pragma once

#include "../transfer_kv.h"

namespace hicache {

class AscendHostMemoryMap : public HostMemoryMap {
 public:
  const char* device_address(const char* begin, const char* end) const override;
  // Whether any tensor of a call got another address than the host's.
  mutable bool has_translated = false;
};

// Host addresses inside [begin, end) at which a registration begins or ends: no copy goes over one.
std::vector<const char*> registration_seams(const char* begin, const char* end);

enum class HostMemory { kPageable, kPinned };
// What the copy engine may assume of memory that tensors call the CPU's.
HostMemory kind_of(const void* host);

}  // namespace hicache
