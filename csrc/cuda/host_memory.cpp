#include "host_memory.h"

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>

#include "../host_registrations.h"
#include "runtime.h"

namespace hicache {
namespace {

// Never destroyed: tensors may outlive static objects.
HostRegistrations& registrations() {
  static auto* instance = new HostRegistrations;
  return *instance;
}

// Null where the runtime does not know `address` as memory of the host.
const char* runtime_device_address(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged
             ? static_cast<const char*>(attributes.devicePointer)
             : nullptr;
}

void register_host_memory(const Tensor& on_device, int64_t address, int64_t nbytes) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const RelaxedCapture relaxed;
  void* host = reinterpret_cast<void*>(address);
  check_cuda(cudaHostRegister(host, nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
             "cudaHostRegister");
  void* device = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&device, host, 0);
  if (mapped != cudaSuccess)
    (void)cudaHostUnregister(host);
  check_cuda(mapped, "cudaHostGetDevicePointer");
  registrations().add(static_cast<const char*>(host), static_cast<size_t>(nbytes),
                      static_cast<const char*>(device));
}

// Waits for the device first: a transfer that still uses the memory must not lose it. Where that is not
// possible (while a stream captures) the memory stays registered, and the call may be made again.
void unregister_host_memory(const Tensor& on_device, int64_t address) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const RelaxedCapture relaxed;
  const char* host = reinterpret_cast<const char*>(address);
  if (registrations().device_address(host, host + 1) == nullptr)
    throw std::invalid_argument("[host_memory] this memory was not registered here.");
  if (is_capturing(current_stream(on_device.get_device_index())))  // waiting would end the capture
    throw std::runtime_error("[host_memory] memory can't be unregistered while the current stream captures.");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check_cuda(cudaHostUnregister(const_cast<char*>(host)), "cudaHostUnregister");
  registrations().remove(host);
}

int64_t host_device_address(const Tensor& on_device, int64_t address, int64_t nbytes) {
  const torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  const char* begin = reinterpret_cast<const char*>(address);
  const char* device = CudaHostMemoryMap().device_address(begin, begin + nbytes);
  if (device == nullptr)
    throw std::invalid_argument(
        "[device_view] the tensor is pageable host memory, which the device can't reach; allocate it with "
        "torch_hicache.empty_host(shape, dtype, device).");
  return reinterpret_cast<int64_t>(device);
}

}  // namespace

const char* CudaHostMemoryMap::device_address(const char* begin, const char* end) const {
  if (const char* device = registrations().device_address(begin, end))
    return device;
  // A registration by others may end inside the tensor.
  const char* first = runtime_device_address(begin);
  const char* last = runtime_device_address(end - 1);
  return first != nullptr && last == first + (end - 1 - begin) ? first : nullptr;
}

std::vector<const char*> CudaHostMemoryMap::seams(const char* begin, const char* end) const {
  return registrations().seams(begin, end);
}

bool is_host_memory(const void* device_address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, device_address) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CUDA, m) {
  m.impl("register_host_memory", TORCH_BOX(&hicache::register_host_memory));
  m.impl("unregister_host_memory", TORCH_BOX(&hicache::unregister_host_memory));
  m.impl("host_device_address", TORCH_BOX(&hicache::host_device_address));
}
