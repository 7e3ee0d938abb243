// Registers the HIP backend under the dispatch key that torch uses for AMD GPUs in this process, and asks torch
// for its stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <exception>
#include <string>

#include "../device_state.h"
#include "../known_calls.h"
#include "copy_launch.h"
#include "host_memory.h"
#include "runtime.h"
#include "transfer_kv.h"

// Weak, so that one library serves every torch: the first exists from torch 2.13 on for all devices, the second
// in a torch that is built for a GPU.
extern "C" {
__attribute__((weak)) AOTITorchError torch_stream_native_handle(StreamHandle stream, void** native_handle);
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
}

namespace hicache {

hipStream_t current_stream(int32_t device_index) {
  void* native = nullptr;
  if (torch_stream_native_handle != nullptr) {
    StreamHandle stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_stream(device_index, &stream));
    const AOTITorchError status = torch_stream_native_handle(stream, &native);
    TORCH_ERROR_CODE_CHECK(aoti_torch_delete_stream(stream));
    TORCH_ERROR_CODE_CHECK(status);
  } else if (aoti_torch_get_current_cuda_stream != nullptr) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &native));
  } else {
    throw std::runtime_error(
        "[transfer_kv] this torch can't tell the stream of a device that is not its own; install torch 2.13 or "
        "newer.");
  }
  return static_cast<hipStream_t>(native);
}

}  // namespace hicache

// Called once by torch_hicache/_backends.py. Returns null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* hicache_register_hip(const char* dispatch_key) {
  using torch::stable::detail::StableLibrary;
  static std::string error;
  try {
    // Never destroyed: that would undo the registration.
    auto* library = new StableLibrary(StableLibrary::Kind::IMPL, "hicache", dispatch_key, __FILE__, __LINE__);
    library->impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_hip));
    library->impl("transfer_known",
                  TORCH_BOX((&hicache::transfer_known<hicache::transfer_kv_hip, &hicache::page_indices>)));
    library->impl("keep_call", TORCH_BOX(&hicache::keep_call));
    library->impl("page_indices", TORCH_BOX(&hicache::page_indices));
    library->impl("explain", TORCH_BOX(&hicache::explain_hip));
    library->impl("set_method_table", TORCH_BOX(&hicache::set_method_table));
    library->impl("check_errors", TORCH_BOX(&hicache::check_errors));
    library->impl("new_error_record", TORCH_BOX(&hicache::new_error_record));
    library->impl("free_error_record", TORCH_BOX(&hicache::free_error_record));
    library->impl("use_error_record", TORCH_BOX(&hicache::use_error_record));
    library->impl("check_error_record", TORCH_BOX(&hicache::check_error_record));
    library->impl("register_host_memory", TORCH_BOX(&hicache::register_host_memory));
    library->impl("unregister_host_memory", TORCH_BOX(&hicache::unregister_host_memory));
    library->impl("host_device_address", TORCH_BOX(&hicache::host_device_address));
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
    return error.c_str();
  }
}
