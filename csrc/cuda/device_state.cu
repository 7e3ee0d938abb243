#include "device_state.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "runtime.h"
#include "streams.h"

namespace hicache {
namespace {

__device__ ErrorLock error_lock;  // one in each device's copy of this module

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
  cudaStream_t copy_streams[2] = {nullptr, nullptr};  // load, store
};

thread_local std::array<int64_t, kMaxDevices> record_in_use{};

// Never destroyed: kernels may still report while the process exits.
DeviceState& device_state(int32_t device_index) {
  static auto* states = new std::array<DeviceState, kMaxDevices>;
  if (device_index < 0 || device_index >= kMaxDevices)
    throw std::runtime_error("[transfer_kv] device index " + std::to_string(device_index) +
                             " is beyond what this build can hold.");
  return (*states)[device_index];
}

ErrorRecord* allocate_records(int64_t count, ErrorRecord** device_records) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, count * sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc for error records");
  auto* records = static_cast<ErrorRecord*>(memory);
  for (int64_t i = 0; i < count; ++i) {
    records[i].epoch = 1;
    records[i].sequence = records[i].published = 0;
  }
  void* on_device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&on_device, memory, 0), "cudaHostGetDevicePointer");
  *device_records = static_cast<ErrorRecord*>(on_device);
  return records;
}

void create(DeviceState& state) {
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.record.load() != nullptr)
    return;
  const RelaxedCapture relaxed;
  ErrorRecord* record = allocate_records(1, &state.device_record);
  void* lock = nullptr;
  check_cuda(cudaGetSymbolAddress(&lock, error_lock), "cudaGetSymbolAddress");
  state.lock = static_cast<ErrorLock*>(lock);
  state.record.store(record);
}

cudaStream_t stream_of(DeviceState& state, bool is_store) {
  cudaStream_t& stream = state.copy_streams[is_store ? 1 : 0];
  if (stream == nullptr) {
    const RelaxedCapture relaxed;
    int lowest = 0, highest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
               "cudaStreamCreateWithPriority");
  }
  return stream;
}

void add_slab(DeviceState& state) {
  const RelaxedCapture relaxed;
  RecordSlab slab{};
  slab.records = allocate_records(kSlabRecords, &slab.device_records);
  void* locks = nullptr;
  check_cuda(cudaMalloc(&locks, kSlabRecords * sizeof(ErrorLock)), "cudaMalloc for error records");
  slab.locks = static_cast<ErrorLock*>(locks);
  const cudaStream_t stream = stream_of(state, /*is_store=*/false);
  check_cuda(cudaMemsetAsync(locks, 0, kSlabRecords * sizeof(ErrorLock), stream), "cudaMemsetAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
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

int64_t new_error_record(const torch::stable::Tensor& on_device) {
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
void free_error_record(const torch::stable::Tensor& on_device, int64_t handle) {
  DeviceState& state = device_state(on_device.get_device_index());
  const std::lock_guard<std::mutex> guard(state.mutex);
  (void)slab_of(state, handle);
  if (std::find(state.free_records.begin(), state.free_records.end(), handle) != state.free_records.end())
    throw std::invalid_argument(concat("[error_record] record ", handle, " was freed before."));
  state.free_records.push_back(handle);
}

void use_error_record(const torch::stable::Tensor& on_device, int64_t handle) {
  const int32_t device_index = on_device.get_device_index();
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (handle != 0)
    (void)slab_of(state, handle);
  record_in_use[device_index] = handle;
}

// Throws what is in the record, and clears it.
void throw_if_recorded(ErrorRecord* record, int32_t device_index, const char* context) {
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
      concat("[transfer_kv] ", context, "call ", call, " on cuda:", device_index, ": ");
  if (what == static_cast<int32_t>(BadValue::kCount))
    throw std::out_of_range(
        concat(call_text, "count is ", value, ", outside 0 to ", limit, ", and was clamped."));
  const char* name = what == static_cast<int32_t>(BadValue::kDstIndex) ? "dst_indices[" : "src_indices[";
  throw std::out_of_range(concat(call_text, name, position, "] is ", value, ", out of range for ", limit,
                                 " slots (-1 skips an entry). The entry was skipped, the others were copied."));
}

void check_error_record(const torch::stable::Tensor& on_device, int64_t handle) {
  const int32_t device_index = on_device.get_device_index();
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  throw_if_recorded(&slab_of(state, handle).records[(handle - 1) % kSlabRecords], device_index, "");
}

void set_method_table(const torch::stable::Tensor& on_device, const std::vector<int64_t>& values) {
  const MethodTable table = method_table_from(values);
  DeviceState& state = device_state(on_device.get_device_index());
  const std::lock_guard<std::mutex> guard(state.mutex);
  state.table = table;
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

void throw_recorded_error(int32_t device_index, bool is_later_call) {
  DeviceState& state = device_state(device_index);
  ErrorRecord* record = state.record.load();
  if (record == nullptr || record->published != record->epoch || record_in_use[device_index] != 0)
    return;
  const std::lock_guard<std::mutex> guard(state.mutex);
  throw_if_recorded(record, device_index, is_later_call ? "an earlier call failed: " : "");
}

MethodTable method_table(int32_t device_index) {
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  return state.table;
}

cudaStream_t copy_stream(int32_t device_index, bool is_store) {
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  return stream_of(state, is_store);
}

}  // namespace hicache

STABLE_TORCH_LIBRARY_IMPL(hicache, CUDA, m) {
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors_cuda));
  m.impl("new_error_record", TORCH_BOX(&hicache::new_error_record));
  m.impl("free_error_record", TORCH_BOX(&hicache::free_error_record));
  m.impl("use_error_record", TORCH_BOX(&hicache::use_error_record));
  m.impl("check_error_record", TORCH_BOX(&hicache::check_error_record));
  m.impl("set_method_table", TORCH_BOX(&hicache::set_method_table));
}
