#include "device_state.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>

#include "recorded_error.h"
#include "copy_kernels.h"
#include "runtime.h"

namespace hicache {
namespace {

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
    throw std::runtime_error(
        concat("[transfer_kv] device index ", device_index, " is beyond what this build can hold."));
  return (*states)[device_index];
}

void create(DeviceState& state) {
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.record.load() != nullptr)
    return;
  const RelaxedCapture relaxed;
  ErrorLock* lock = nullptr;
  check_hip(error_lock_address(&lock), "finding this GPU's code in the library");
  void* memory = nullptr;
  // Coherent: the host sees the record while the kernel that wrote it still runs.
  check_hip(hipHostMalloc(&memory, sizeof(ErrorRecord),
                          hipHostMallocMapped | hipHostMallocPortable | hipHostMallocCoherent),
            "hipHostMalloc for the error record");
  void* device_record = nullptr;
  const hipError_t mapped = hipHostGetDevicePointer(&device_record, memory, 0);
  if (mapped != hipSuccess)
    (void)hipHostFree(memory);
  check_hip(mapped, "hipHostGetDevicePointer");
  auto* record = static_cast<ErrorRecord*>(memory);
  record->epoch = 1;
  record->sequence = record->published = 0;
  state.device_record = static_cast<ErrorRecord*>(device_record);
  state.lock = lock;
  state.record.store(record);
}

}  // namespace

void check_errors_hip(const Tensor& on_device) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(on_device.get(), &device.type));
  device.index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device.index);
  const hipStream_t stream = current_stream(device.index);
  if (is_capturing(stream))
    return;
  {
    const RelaxedCapture relaxed;
    check_hip(hipStreamSynchronize(stream), "hipStreamSynchronize");
  }
  throw_recorded_error(device, /*is_later_call=*/false);
}

ErrorSink next_error_sink(const Device& device) {
  DeviceState& state = device_state(device.index);
  if (state.record.load() == nullptr)
    create(state);
  return {state.device_record, state.lock, ++state.calls};
}

void throw_recorded_error(const Device& device, bool is_later_call) {
  DeviceState& state = device_state(device.index);
  ErrorRecord* record = state.record.load();
  if (record == nullptr || record->published != record->epoch)
    return;
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (record->published != record->epoch)
    return;  // another thread was faster
  throw_and_clear(*record, device_name(device), is_later_call);
}

}  // namespace hicache
