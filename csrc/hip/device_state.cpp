#include "../device_state.h"

#include "copy_kernels.h"
#include "runtime.h"

namespace hicache {
namespace {

// The address of the current device's.
ErrorLock* error_lock_address() {
  ErrorLock* lock = nullptr;
  check_hip(find_error_lock(&lock), "finding this GPU's code in the library");
  return lock;
}

}  // namespace
}  // namespace hicache

// After the above, whose words it uses.
#include "../gpu_device_state.h"
