// What device_state.h declares. Host code that CUDA and HIP share; one source of each library includes it.
//
// The including file supplies, from its vendor's folder: GpuStream, current_stream, is_capturing,
// RelaxedCapture, synchronize, new_copy_stream, allocate_mapped_host, allocate_zeroed, error_lock_address.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "device_state.h"
#include "streams.h"
#include "text.h"

namespace hicache {
namespace {

constexpr int kMaxDevices = 128;
constexpr int64_t kSlabRecords = 64;

// Records for those who want the errors of their own calls apart, numbered from 1 on. Never freed.
struct RecordSlab {
  ErrorRecord* records;
  ErrorRecord* device_records;
  ErrorLock* locks;
};

struct DeviceState {
  std::mutex mutex;  // guards creation and clearing
  std::atomic<ErrorRecord*> record{nullptr};
  ErrorRecord* device_record = nullptr;
  ErrorLock* lock = nullptr;
  std::atomic<int64_t> calls{0};
  std::vector<RecordSlab> slabs;
  std::vector<int64_t> free_records;
  MethodTable table;
  GpuStream copy_streams[2] = {nullptr, nullptr};  // load, store
};

thread_local std::array<int64_t, kMaxDevices> record_in_use{};

// Never destroyed: kernels may still report while the process exits.
DeviceState& device_state(int32_t device_index) {
  static auto* states = new std::array<DeviceState, kMaxDevices>;
  if (device_index < 0 || device_index >= kMaxDevices)
    throw std::runtime_error(
        concat("[transfer_kv] device index ", device_index, " is beyond what this build can hold."));
  return (*states)[device_index];
}

ErrorRecord* allocate_records(int64_t count, ErrorRecord** device_records) {
  void* on_device = nullptr;
  auto* records = static_cast<ErrorRecord*>(allocate_mapped_host(count * sizeof(ErrorRecord), &on_device,
                                                                 "allocating host memory for error records"));
  for (int64_t i = 0; i < count; ++i) {
    records[i].epoch = 1;
    records[i].sequence = records[i].published = 0;
  }
  *device_records = static_cast<ErrorRecord*>(on_device);
  return records;
}

void create(DeviceState& state) {
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.record.load() != nullptr)
    return;
  const RelaxedCapture relaxed;
  state.lock = error_lock_address();
  state.record.store(allocate_records(1, &state.device_record));
}

GpuStream stream_of(DeviceState& state, bool is_store) {
  GpuStream& stream = state.copy_streams[is_store ? 1 : 0];
  if (stream == nullptr) {
    const RelaxedCapture relaxed;
    stream = new_copy_stream();
  }
  return stream;
}

void add_slab(DeviceState& state) {
  const RelaxedCapture relaxed;
  RecordSlab slab{};
  slab.records = allocate_records(kSlabRecords, &slab.device_records);
  const GpuStream stream = stream_of(state, /*is_store=*/false);
  slab.locks = static_cast<ErrorLock*>(
      allocate_zeroed(kSlabRecords * sizeof(ErrorLock), stream, "allocating error records"));
  synchronize(stream);
  const auto first = static_cast<int64_t>(state.slabs.size()) * kSlabRecords + 1;
  state.slabs.push_back(slab);
  for (int64_t i = kSlabRecords; i-- > 0;)
    state.free_records.push_back(first + i);
}

const RecordSlab& slab_of(const DeviceState& state, int64_t handle) {
  if (handle < 1 || handle > static_cast<int64_t>(state.slabs.size()) * kSlabRecords)
    throw std::invalid_argument(concat("[error_record] there is no record ", handle, " on this device."));
  return state.slabs[(handle - 1) / kSlabRecords];
}

Device device_of(const Tensor& tensor) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  device.index = tensor.get_device_index();
  return device;
}

// Throws what is in the record, and clears it.
void throw_if_recorded(ErrorRecord* record, const Device& device, const char* context) {
  if (record->published != record->epoch)
    return;
  int32_t what;
  int64_t call, position, value, limit;
  uint32_t sequence;
  do {  // a kernel that still runs may replace the entry by an earlier one
    sequence = record->sequence;
    std::atomic_thread_fence(std::memory_order_acquire);
    what = record->what;
    call = record->call;
    position = record->position;
    value = record->value;
    limit = record->limit;
    std::atomic_thread_fence(std::memory_order_acquire);
  } while (sequence % 2 != 0 || sequence != record->sequence);
  record->epoch = record->epoch + 1;

  const std::string call_text =
      concat("[transfer_kv] ", context, "call ", call, " on ", device_name(device), ": ");
  if (what == static_cast<int32_t>(BadValue::kCount))
    throw std::out_of_range(
        concat(call_text, "count is ", value, ", outside 0 to ", limit, ", and was clamped."));
  const char* name = what == static_cast<int32_t>(BadValue::kDstIndex) ? "dst_indices[" : "src_indices[";
  throw std::out_of_range(concat(call_text, name, position, "] is ", value, ", out of range for ", limit,
                                 " slots (-1 skips an entry). The entry was skipped, the others were copied."));
}

}  // namespace

int64_t new_error_record(const Tensor& on_device) {
  const int32_t device_index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard device(device_index);
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.free_records.empty())
    add_slab(state);
  const int64_t handle = state.free_records.back();
  state.free_records.pop_back();
  ErrorRecord& record = slab_of(state, handle).records[(handle - 1) % kSlabRecords];
  record.epoch = record.epoch + 1;  // what its last owner left is not this one's
  return handle;
}

// The caller has waited for all that may report into it.
void free_error_record(const Tensor& on_device, int64_t handle) {
  DeviceState& state = device_state(on_device.get_device_index());
  const std::lock_guard<std::mutex> guard(state.mutex);
  (void)slab_of(state, handle);
  if (std::find(state.free_records.begin(), state.free_records.end(), handle) != state.free_records.end())
    throw std::invalid_argument(concat("[error_record] record ", handle, " was freed before."));
  state.free_records.push_back(handle);
}

void use_error_record(const Tensor& on_device, int64_t handle) {
  const int32_t device_index = on_device.get_device_index();
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (handle != 0)
    (void)slab_of(state, handle);
  record_in_use[device_index] = handle;
}

void check_error_record(const Tensor& on_device, int64_t handle) {
  const Device device = device_of(on_device);
  DeviceState& state = device_state(device.index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  throw_if_recorded(&slab_of(state, handle).records[(handle - 1) % kSlabRecords], device, "");
}

void set_method_table(const Tensor& on_device, const std::vector<int64_t>& values) {
  const MethodTable table = method_table_from(values);
  DeviceState& state = device_state(on_device.get_device_index());
  const std::lock_guard<std::mutex> guard(state.mutex);
  state.table = table;
}

void check_errors(const Tensor& on_device) {
  const Device device = device_of(on_device);
  const torch::stable::accelerator::DeviceGuard guard(device.index);
  const GpuStream stream = current_stream(device.index);
  if (is_capturing(stream))
    return;
  {
    const RelaxedCapture relaxed;
    synchronize(stream);
  }
  throw_recorded_error(device, /*is_later_call=*/false);
}

ErrorSink next_error_sink(int32_t device_index) {
  DeviceState& state = device_state(device_index);
  if (const int64_t handle = record_in_use[device_index]) {
    const std::lock_guard<std::mutex> guard(state.mutex);
    const RecordSlab& slab = slab_of(state, handle);
    const int64_t i = (handle - 1) % kSlabRecords;
    return {slab.device_records + i, slab.locks + i, ++state.calls};
  }
  if (state.record.load() == nullptr)
    create(state);
  return {state.device_record, state.lock, ++state.calls};
}

void throw_recorded_error(const Device& device, bool is_later_call) {
  DeviceState& state = device_state(device.index);
  ErrorRecord* record = state.record.load();
  if (record == nullptr || record->published != record->epoch || record_in_use[device.index] != 0)
    return;
  const std::lock_guard<std::mutex> guard(state.mutex);
  throw_if_recorded(record, device, is_later_call ? "an earlier call failed: " : "");
}

MethodTable method_table(int32_t device_index) {
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  return state.table;
}

GpuStream copy_stream(int32_t device_index, bool is_store) {
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  return stream_of(state, is_store);
}

}  // namespace hicache
