// The entries of a call in the form that the copy kernel reads, on the device: as given, uploaded from
// the CPU, or sorted by host address.
#pragma once

#include <cuda_runtime.h>

#include "../entries.h"

namespace hicache {

// out[e] = host_slots[e] where entry first_entry + e of `device_slots` is padding or out of range, else -1.
void select_skipped(const DeviceIndices& device_slots, int64_t first_entry, int64_t num_device_slots,
                    const int64_t* host_slots, int64_t size, int64_t* out, cudaStream_t stream);

// Uploads what is on the CPU without waiting for the stream.
Entries device_entries(const TransferArgs& args, cudaStream_t stream);

// The op of this name.
Tensor page_indices(const Tensor& tokens, int64_t page_size);

// Reorders entries by the slot of the host pool; bad ones are reported and become padding. Only for slot
// numbers below 2^31.
void sort_entries(Entries& entries, const TransferArgs& args, const ErrorSink& errors, bool by_dst,
                  cudaStream_t stream);

}  // namespace hicache
