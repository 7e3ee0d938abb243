// The copy_engine method: contiguous runs, handed to the DMA engines one by one.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstddef>
#include <vector>

#include "../transfer_kv.h"

namespace hicache {

void submit_copies(std::vector<void*>& dst, std::vector<const void*>& src, std::vector<size_t>& sizes,
                   hipStream_t stream);

void transfer_by_copy_engine(const TransferArgs& args, bool is_store, const HostMemoryMap& map,
                             hipStream_t stream);

}  // namespace hicache
