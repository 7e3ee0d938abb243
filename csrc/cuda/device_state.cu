#include "device_state.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>

#include "../recorded_error.h"
#include "runtime.h"

namespace hicache {
namespace {

__device__ ErrorLock error_lock;  // one in each device's copy of this module

constexpr int kMaxDevices = 128;

struct DeviceState {
  std::mutex mutex;  // guards creation and clearing
  std::atomic<ErrorRecord*> record{nullptr};
  ErrorRecord* device_record = nullptr;
  ErrorLock* lock = nullptr;
  std::atomic<int64_t> calls{0};
};

// Never destroyed: kernels may still report while the process exits.
DeviceState& device_state(int32_t device_index) {
  static auto* states = new std::array<DeviceState, kMaxDevices>;
  if (device_index < 0 || device_index >= kMaxDevices)
    throw std::runtime_error("[transfer_kv] device index " + std::to_string(device_index) +
                             " is beyond what this build can hold.");
  return (*states)[device_index];
}

void create(DeviceState& state) {
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.record.load() != nullptr)
    return;
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc for the error record");
  auto* record = static_cast<ErrorRecord*>(memory);
  record->epoch = 1;
  record->sequence = record->published = 0;
  void* device_record = nullptr;
  check_cuda(cudaHostGetDevicePointer(&device_record, memory, 0), "cudaHostGetDevicePointer");
  state.device_record = static_cast<ErrorRecord*>(device_record);
  void* lock = nullptr;
  check_cuda(cudaGetSymbolAddress(&lock, error_lock), "cudaGetSymbolAddress");
  state.lock = static_cast<ErrorLock*>(lock);
  state.record.store(record);
}

void check_errors_cuda(const torch::stable::Tensor& on_device) {
  const int32_t device_index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  const cudaStream_t stream = current_stream(device_index);
  if (is_capturing(stream))
    return;
  {
    const RelaxedCapture relaxed;
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  throw_recorded_error(device_index, /*is_later_call=*/false);
}

}  // namespace

ErrorSink next_error_sink(int32_t device_index) {
  DeviceState& state = device_state(device_index);
  if (state.record.load() == nullptr)
    create(state);
  return {state.device_record, state.lock, ++state.calls};
}

void throw_recorded_error(int32_t device_index, bool is_later_call) {
  DeviceState& state = device_state(device_index);
  ErrorRecord* record = state.record.load();
  if (record == nullptr || record->published != record->epoch)
    return;
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (record->published != record->epoch)
    return;  // another thread was faster
  throw_and_clear(*record, concat("cuda:", device_index), is_later_call);
}

}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CUDA, m) {
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors_cuda));
}
