// The entries of a call, sorted by host address.
#pragma once

#include <cuda_runtime.h>

#include "../entries.h"

namespace hicache {

// Reorders entries by the slot of the host pool; bad ones are reported and become padding. Only for slot
// numbers below 2^31.
void sort_entries(Entries& entries, const TransferArgs& args, const ErrorSink& errors, bool by_dst,
                  cudaStream_t stream);

}  // namespace hicache
