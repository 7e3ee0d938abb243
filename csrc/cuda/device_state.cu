#include <torch/csrc/stable/library.h>

#include "../error_record.cuh"
#include "runtime.h"

namespace hicache {
namespace {

__device__ ErrorLock error_lock;  // one in each device's copy of this module

// The address of the current device's.
ErrorLock* error_lock_address() {
  void* lock = nullptr;
  check_cuda(cudaGetSymbolAddress(&lock, error_lock), "cudaGetSymbolAddress");
  return static_cast<ErrorLock*>(lock);
}

}  // namespace
}  // namespace hicache

// After the above, whose words it uses.
#include "../gpu_device_state.h"

STABLE_TORCH_LIBRARY_IMPL(hicache, CUDA, m) {
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors));
  m.impl("new_error_record", TORCH_BOX(&hicache::new_error_record));
  m.impl("free_error_record", TORCH_BOX(&hicache::free_error_record));
  m.impl("use_error_record", TORCH_BOX(&hicache::use_error_record));
  m.impl("check_error_record", TORCH_BOX(&hicache::check_error_record));
  m.impl("set_method_table", TORCH_BOX(&hicache::set_method_table));
}
