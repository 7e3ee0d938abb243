// Method `copy_engine`: runs of neighbouring slots, by the driver's own copies; indices on the CPU.
#pragma once

#include "../transfer_kv.h"

namespace hicache {

// Submits a call whose addresses are the host's on the host's side. Blocks only for pageable memory.
void copy_by_engine(const TransferArgs& args);

}  // namespace hicache
