// The copy_engine method: contiguous runs, handed to the DMA engine in batches.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "../transfer_kv.h"

namespace hicache {

// A batch of copies; the stream is not the legacy default stream, which batches refuse.
void submit_copies(std::vector<void*>& dst, std::vector<const void*>& src, std::vector<size_t>& sizes,
                   cudaStream_t stream);

void transfer_by_copy_engine(const TransferArgs& args, bool is_store, const HostMemoryMap& map,
                             cudaStream_t stream);

}  // namespace hicache
