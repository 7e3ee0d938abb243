#include "staged.h"

#include "copy_engine.h"
#include "copy_launch.h"
#include "runtime.h"
#include "upload.h"

namespace hicache {

constexpr int64_t kStagedBlocks = kOnDeviceBlocks;

}  // namespace hicache

// After the above, whose words it uses.
#include "../staged_transfer.h"

namespace hicache {

void transfer_staged(const TransferArgs& args, bool is_store, const ErrorSink& errors, const MethodTable& table,
                     const HostMemoryMap& map, hipStream_t stream) {
  StagedTransfer(args, is_store, errors, table, map, stream).run();
}

}  // namespace hicache
