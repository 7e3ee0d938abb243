// Small arrays from the host to the device, for a stream that must not wait for the copy engine: a big load of
// another stream may keep that busy for milliseconds. A kernel fetches them out of page-locked memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../transfer_kv.h"

namespace hicache {

// One array on its way: write to data(), then take it to the device, once.
class Upload {
 public:
  explicit Upload(int64_t nbytes);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  char* data() const;
  // Device memory of the caller's current stream, `stream`, that holds the bytes when the stream gets there.
  Tensor to_device(const Device& device, cudaStream_t stream);

  struct Block;

 private:
  int64_t nbytes_;
  Block* block_;  // goes back for reuse; the next user waits until the kernel has read it
};

// Device memory of the caller's current stream.
Tensor empty_bytes(int64_t nbytes, const Device& device);

}  // namespace hicache
