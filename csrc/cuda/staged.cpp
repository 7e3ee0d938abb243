#include "staged.h"

#include "copy_engine.h"
#include "copy_kernel.h"
#include "entries.h"
#include "runtime.h"
#include "upload.h"

namespace hicache {

// All SMs of an H200 for some 50 microseconds a buffer: the model's kernels wait less than for fewer SMs
// longer.
constexpr int64_t kStagedBlocks = 132;

}  // namespace hicache

// After the above, whose words it uses.
#include "../staged_transfer.h"

namespace hicache {

void transfer_staged(const TransferArgs& args, bool is_store, const ErrorSink& errors, const MethodTable& table,
                     const HostMemoryMap& map, cudaStream_t stream) {
  StagedTransfer(args, is_store, errors, table, map, stream).run();
}

}  // namespace hicache
