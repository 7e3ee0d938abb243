// The staged method: between the host pool and a ring of buffers on the device the copy engine moves long runs;
// between the buffers and the device pool a kernel gathers or scatters.
#pragma once

#include <cuda_runtime.h>

#include "../error_record.cuh"
#include "../plan.h"

namespace hicache {

void transfer_staged(const TransferArgs& args, bool is_store, const ErrorSink& errors, const MethodTable& table,
                     const HostMemoryMap& map, cudaStream_t stream);

}  // namespace hicache
