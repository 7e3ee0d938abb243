#include "upload.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace hicache {
namespace {

Tensor empty_pinned(int64_t nbytes) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided_pinned(1, &nbytes, &stride, aoti_torch_dtype_uint8(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

}  // namespace

Upload::Upload(int64_t nbytes) : nbytes_(nbytes), pinned_(empty_pinned(nbytes)) {}

char* Upload::data() const {
  return static_cast<char*>(pinned_.data_ptr());
}

Tensor Upload::to_device(const Device& device, hipStream_t /*torch's current one*/) {
  Tensor on_device = empty_bytes(nbytes_, device);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(on_device.get(), pinned_.get(), /*non_blocking=*/1));
  return on_device;
}

Tensor empty_bytes(int64_t nbytes, const Device& device) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &nbytes, &stride, aoti_torch_dtype_uint8(), device.type,
                                                  device.index, &handle));
  return Tensor(handle);
}

}  // namespace hicache
