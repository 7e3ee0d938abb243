// Small arrays from the host to the device, in the caller's stream.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>

#include "../transfer_kv.h"

namespace hicache {

// One array on its way: write to data(), then take it to the device, once. Page-locked memory of torch's own
// allocator, which frees it only when the copy out of it has run.
class Upload {
 public:
  explicit Upload(int64_t nbytes);

  char* data() const;
  // Device memory of the caller's current stream, `stream`, that holds the bytes when the stream gets there.
  Tensor to_device(const Device& device, hipStream_t stream);

 private:
  int64_t nbytes_;
  Tensor pinned_;
};

// Device memory of the caller's current stream, out of torch's own allocator.
Tensor empty_bytes(int64_t nbytes, const Device& device);

}  // namespace hicache
