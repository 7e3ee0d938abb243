#include "runtime.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

// In torch's stable ABI from 2.13 on; null in an older libtorch.
extern "C" __attribute__((weak)) AOTITorchError torch_stream_native_handle(StreamHandle stream, void** handle);

namespace hicache {
namespace {

constexpr int kCaptureActive = 1;

void* open_loaded(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  return library != nullptr ? library : dlopen(name, RTLD_NOW);
}

Driver load_driver() {
  void* library = open_loaded("libascendcl.so");
  if (library == nullptr)
    throw std::runtime_error(concat("[transfer_kv] libascendcl.so can't be loaded: ", dlerror(),
                                    ". Source CANN's set_env.sh before starting Python."));
  const auto find = [&](auto& function, const char* name, bool needed = false) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && needed)
      throw std::runtime_error(concat("[transfer_kv] this CANN has no ", name, "; install CANN 8.0 or newer."));
  };
  Driver found{};
  find(found.malloc_device, "aclrtMalloc", true);
  find(found.malloc_host, "aclrtMallocHost", true);
  find(found.memset, "aclrtMemset", true);
  find(found.memset_async, "aclrtMemsetAsync", true);
  find(found.memcpy, "aclrtMemcpy", true);
  find(found.memcpy_async, "aclrtMemcpyAsync", true);
  find(found.create_event, "aclrtCreateEventWithFlag", true);
  find(found.record_event, "aclrtRecordEvent", true);
  find(found.wait_event, "aclrtStreamWaitEvent", true);
  find(found.synchronize_stream, "aclrtSynchronizeStream", true);
  find(found.synchronize_device, "aclrtSynchronizeDevice", true);
  find(found.recent_error, "aclGetRecentErrMsg", true);
  find(found.memcpy_2d_async, "aclrtMemcpy2dAsync");
  find(found.memcpy_batch_async, "aclrtMemcpyBatchAsync");
  find(found.host_register, "aclrtHostRegister");
  find(found.host_unregister, "aclrtHostUnregister");
  find(found.pointer_attributes, "aclrtPointerGetAttributes");
  find(found.device_info, "aclrtGetDeviceInfo");
  find(found.device_capability, "aclGetDeviceCapability");
  find(found.capture_info, "aclmdlRICaptureGetInfo");
  find(found.soc_name, "aclrtGetSocName");
  return found;
}

using NpuStream = AOTITorchError (*)(int32_t device_index, void** stream);

NpuStream npu_stream_function() {
  static const auto function = [] {
    void* library = open_loaded("libtorch_npu.so");
    return library == nullptr
               ? nullptr
               : reinterpret_cast<NpuStream>(dlsym(library, "aoti_torch_get_current_npu_stream"));
  }();
  if (function == nullptr)
    throw std::runtime_error(
        "[transfer_kv] libtorch_npu.so has no aoti_torch_get_current_npu_stream; install a "
        "newer torch_npu.");
  return function;
}

}  // namespace

const Driver& driver() {
  static const Driver found = load_driver();
  return found;
}

void check_acl(int status, const char* what) {
  if (status == 0)
    return;
  const char* text = driver().recent_error();
  throw std::runtime_error(
      concat("[transfer_kv] ", what, " failed with ", status, ": ", text != nullptr ? text : "no text", "."));
}

void* current_stream(int32_t device_index) {
  void* native = nullptr;
  if (torch_stream_native_handle != nullptr) {
    StreamHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_stream(device_index, &handle));
    const torch::stable::accelerator::Stream stream(handle);  // owns the handle
    TORCH_ERROR_CODE_CHECK(torch_stream_native_handle(handle, &native));
  } else {
    TORCH_ERROR_CODE_CHECK(npu_stream_function()(device_index, &native));
  }
  return native;
}

bool is_capturing(void* stream) {
  int status = 0;
  void* model = nullptr;
  return driver().capture_info != nullptr && driver().capture_info(stream, &status, &model) == 0 &&
         status == kCaptureActive;
}

}  // namespace hicache
