// Method `copy_engine`: runs of neighbouring slots, by the driver's own copies; indices on the CPU.
#pragma once

#include "../transfer_kv.h"

namespace hicache {

// What a call asks the driver for: contiguous rows, and calls of the driver where it has all that is asked of
// it.
struct CopyCounts {
  int64_t rows = 0;
  int64_t submissions = 0;
};

// Submits a call whose addresses are the host's on the host's side. Blocks only for pageable memory.
void copy_by_engine(const TransferArgs& args);

// The same without submitting anything.
CopyCounts count_copies(const TransferArgs& args);

}  // namespace hicache
