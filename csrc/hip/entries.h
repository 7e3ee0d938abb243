// The entries of a call in the form that the copy kernel reads, on the device: as given, or uploaded from the
// CPU.
#pragma once

#include <vector>

#include "../copy_params.h"
#include "../transfer_kv.h"

namespace hicache {

struct Entries {
  DeviceIndices dst{};
  DeviceIndices src{};
  DeviceIndices count{};
  int64_t num_entries = 0;
  std::vector<int32_t> inline_dst, inline_src;  // few entries travel in the kernel's parameters
  std::vector<Tensor> scratch;  // what the pointers above point into; torch frees it in stream order
};

// Uploads what is on the CPU without waiting for the stream.
Entries device_entries(const TransferArgs& args);

// A flat tensor on `device` out of torch's own allocator.
Tensor empty_tensor(int64_t elements, int32_t dtype, const Device& device);

}  // namespace hicache
