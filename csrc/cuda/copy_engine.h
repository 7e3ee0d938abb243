// The copy_engine method: contiguous runs, handed to the DMA engine in batches.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "../copy_blocks.h"
#include "../transfer_kv.h"

namespace hicache {

// Collects copies for one stream, which is not the legacy default stream: batches refuse that one.
class CopyQueue {
 public:
  // `seams`: device addresses, ascending, over which no copy may lead.
  CopyQueue(cudaStream_t stream, std::vector<const char*> seams);

  void add(const CopyBlock& block);
  // Submits what is left. Without it, copies may be lost.
  void flush();

 private:
  void add_row(char* dst, const char* src, int64_t bytes);
  const char* next_seam(const char* begin, const char* end) const;

  cudaStream_t stream_;
  std::vector<const char*> seams_;
  std::vector<void*> dst_;
  std::vector<const void*> src_;
  std::vector<size_t> sizes_;
};

// The seams in the host memory of a call, as addresses of the device.
std::vector<const char*> seams_of(const TransferArgs& args);

void transfer_by_copy_engine(const TransferArgs& args, bool is_store, cudaStream_t stream);

}  // namespace hicache
