#include "error_records.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "backend.h"
#include "chip.h"
#include "kv_exchange_params.h"
#include "runtime.h"

namespace hicache {

struct ErrorRecord {
  std::atomic<char*> device_lines{nullptr};
  volatile int64_t* host_lines = nullptr;  // page-locked copy of what the cores wrote
  std::vector<int64_t> seen;  // by core: the number of the last report that was thrown, or passed over
  bool is_clean = false;      // nothing has been reported since the lines were zeroed
  bool needs_zeros = false;   // on the device, before the next launch
};

namespace {

constexpr int kMallocHugeFirst = 0;
constexpr int64_t kRecordsAtOnce = 16;

struct DeviceRecords {
  std::mutex mutex;  // guards all but the atomics
  ErrorRecord own;
  void* own_is_zeroed = nullptr;      // event; null where the zeros are older than every call
  std::set<void*> streams_behind_it;  // the handle of a stream that is gone may come back: as much behind
  std::deque<ErrorRecord> others;     // by handle, from 1 on
  std::vector<int64_t> free_handles;
  std::atomic<int64_t> calls{0};
  int64_t cores = 0;
};

// The record that calls of this thread report into; 0: the device's own.
thread_local std::array<int64_t, kMaxDevices> handle_in_use{};

// Never destroyed: copies of a record may arrive while the process exits.
DeviceRecords& records_of(int32_t device_index) {
  static auto* all = new std::array<DeviceRecords, kMaxDevices>;
  return (*all)[device_place(device_index)];
}

ErrorRecord& other_record(DeviceRecords& records, int64_t handle) {
  if (handle < 1 || handle > static_cast<int64_t>(records.others.size()))
    throw std::invalid_argument(concat("[error_record] there is no record ", handle, " on this device."));
  return records.others[static_cast<size_t>(handle - 1)];
}

size_t record_bytes(int64_t cores) {
  return static_cast<size_t>(2 * cores * kErrorLineBytes);
}

// Memory for `count` records, given to them one by one. The device's lines hold anything.
template <typename Next>
void allocate(DeviceRecords& records, int32_t device_index, int64_t count, const Next& next) {
  records.cores = chip_of(device_index).vector_cores;
  const size_t nbytes = record_bytes(records.cores);
  void *host = nullptr, *device = nullptr;
  check_acl(driver().malloc_host(&host, count * nbytes), "aclrtMallocHost for error records");
  check_acl(driver().malloc_device(&device, count * nbytes, kMallocHugeFirst), "aclrtMalloc for error records");
  std::memset(host, 0, count * nbytes);
  for (int64_t i = 0; i < count; ++i) {
    ErrorRecord& record = next();
    record.host_lines = reinterpret_cast<volatile int64_t*>(static_cast<char*>(host) + i * nbytes);
    record.seen.assign(static_cast<size_t>(records.cores), 0);
    record.device_lines.store(static_cast<char*>(device) + i * nbytes);
  }
}

// The zeros come in the order of `stream`. A graph that is being captured would bring them with every replay,
// so there, and only there, the driver waits for them.
void create_own(DeviceRecords& records, int32_t device_index, void* stream) {
  ErrorRecord made;
  void* zeroed = nullptr;
  allocate(records, device_index, 1, [&]() -> ErrorRecord& { return made; });
  const size_t nbytes = record_bytes(records.cores);
  if (is_capturing(stream)) {
    check_acl(driver().memset(made.device_lines.load(), nbytes, 0, nbytes), "aclrtMemset");
  } else {
    check_acl(driver().create_event(&zeroed, kEventSync), "aclrtCreateEventWithFlag");
    check_acl(driver().memset_async(made.device_lines.load(), nbytes, 0, nbytes, stream), "aclrtMemsetAsync");
    check_acl(driver().record_event(zeroed, stream), "aclrtRecordEvent");
    records.streams_behind_it.insert(stream);
  }
  records.own_is_zeroed = zeroed;
  records.own.host_lines = made.host_lines;
  records.own.seen = made.seen;
  records.own.device_lines.store(made.device_lines.load());
}

// The device's own record serves all streams: each is put behind the zeros once. A captured stream can't wait
// for what was not captured; torch waits for the device before it captures.
void put_behind_zeros(DeviceRecords& records, void* stream) {
  if (records.own_is_zeroed == nullptr || records.streams_behind_it.count(stream) != 0 || is_capturing(stream))
    return;
  check_acl(driver().wait_event(stream, records.own_is_zeroed), "aclrtStreamWaitEvent");
  records.streams_behind_it.insert(stream);
}

struct Report {
  int64_t what, call, position, value, limit;
  bool is_before(const Report& other) const {
    return call < other.call || (call == other.call && position < other.position);
  }
};

// The first of what the cores have reported since the last time.
bool take_first(ErrorRecord& record, int64_t cores, Report& first) {
  bool found = false;
  for (int64_t core = 0; core < cores; ++core) {
    const volatile int64_t* line = record.host_lines + (cores + core) * kErrorWords;
    const int64_t sequence = line[kErrorSequence];
    if (sequence == record.seen[static_cast<size_t>(core)])
      continue;
    record.seen[static_cast<size_t>(core)] = sequence;
    const Report report{line[kErrorWhat], line[kErrorCall], line[kErrorPosition], line[kErrorValue],
                        line[kErrorLimit]};
    if (!found || report.is_before(first))
      first = report;
    found = true;
  }
  if (found)
    record.is_clean = false;
  return found;
}

[[noreturn]] void raise(const Report& report, int32_t device_index, const char* context) {
  const std::string call_text =
      concat("[transfer_kv] ", context, "call ", report.call, " on npu:", device_index, ": ");
  if (report.what == kBadCount)
    throw std::out_of_range(
        concat(call_text, "count is ", report.value, ", outside 0 to ", report.limit, ", and was clamped."));
  const char* name = report.what == kBadDstIndex ? "dst_indices[" : "src_indices[";
  throw std::out_of_range(concat(call_text, name, report.position, "] is ", report.value, ", out of range for ",
                                 report.limit,
                                 " slots (-1 skips an entry). The entry was skipped, the others were copied."));
}

}  // namespace

ErrorSink next_error_sink(int32_t device_index, void* stream) {
  DeviceRecords& records = records_of(device_index);
  ErrorRecord* record = &records.own;
  const std::lock_guard<std::mutex> guard(records.mutex);
  if (const int64_t handle = handle_in_use[device_place(device_index)]) {
    record = &other_record(records, handle);
    if (record->needs_zeros) {  // its launches all come on this stream
      const size_t nbytes = record_bytes(records.cores);
      check_acl(driver().memset_async(record->device_lines.load(), nbytes, 0, nbytes, stream),
                "aclrtMemsetAsync");
      record->needs_zeros = false;
    }
  } else {
    if (records.own.device_lines.load() == nullptr)
      create_own(records, device_index, stream);
    put_behind_zeros(records, stream);
  }
  return {record, reinterpret_cast<int64_t>(record->device_lines.load()), records.cores, ++records.calls};
}

void fetch_errors(const ErrorSink& sink, void* stream) {
  const size_t nbytes = record_bytes(sink.cores);
  check_acl(driver().memcpy_async(const_cast<int64_t*>(sink.record->host_lines), nbytes,
                                  sink.record->device_lines.load(), nbytes, kDeviceToHost, stream),
            "aclrtMemcpyAsync of the error record");
}

void throw_recorded_error(int32_t device_index, void* stream, bool is_later_call) {
  DeviceRecords& records = records_of(device_index);
  ErrorRecord& own = records.own;
  if (own.device_lines.load() == nullptr || handle_in_use[device_place(device_index)] != 0)
    return;
  Report first{};
  {
    const std::lock_guard<std::mutex> guard(records.mutex);
    if (!take_first(own, records.cores, first))
      return;
    const auto flags = static_cast<size_t>(records.cores * kErrorLineBytes);
    check_acl(driver().memset_async(own.device_lines.load(), flags, 0, flags, stream), "aclrtMemsetAsync");
  }
  raise(first, device_index, is_later_call ? "an earlier call failed: " : "");
}

// Waits for the work on the current stream, so that the transfers before this call have reported.
void check_errors_ascend(const Tensor& on_device) {
  const int32_t device_index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  void* stream = current_stream(device_index);
  if (is_capturing(stream))
    return;
  DeviceRecords& records = records_of(device_index);
  if (records.own.device_lines.load() != nullptr) {  // replays of a captured graph run no host code that would
    {
      const std::lock_guard<std::mutex> guard(records.mutex);
      put_behind_zeros(records, stream);
    }
    fetch_errors({&records.own, 0, records.cores, 0}, stream);
  }
  check_acl(driver().synchronize_stream(stream), "aclrtSynchronizeStream");
  throw_recorded_error(device_index, stream, /*is_later_call=*/false);
}

int64_t new_error_record(const Tensor& on_device) {
  const int32_t device_index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  DeviceRecords& records = records_of(device_index);
  const std::lock_guard<std::mutex> lock(records.mutex);
  if (records.free_handles.empty()) {
    const auto first = static_cast<int64_t>(records.others.size()) + 1;
    allocate(records, device_index, kRecordsAtOnce,
             [&]() -> ErrorRecord& { return records.others.emplace_back(); });
    for (int64_t i = kRecordsAtOnce; i-- > 0;)
      records.free_handles.push_back(first + i);
  }
  const int64_t handle = records.free_handles.back();
  ErrorRecord& record = other_record(records, handle);
  Report left{};
  (void)take_first(record, records.cores, left);  // what its last owner left is not this one's
  if (!record.is_clean) {
    std::fill(record.seen.begin(), record.seen.end(), 0);
    std::memset(const_cast<int64_t*>(record.host_lines), 0, record_bytes(records.cores));
    record.is_clean = record.needs_zeros = true;
  }
  records.free_handles.pop_back();
  return handle;
}

void use_error_record(const Tensor& on_device, int64_t handle) {
  const int32_t device_index = on_device.get_device_index();
  DeviceRecords& records = records_of(device_index);
  const std::lock_guard<std::mutex> lock(records.mutex);
  if (handle != 0)
    (void)other_record(records, handle);
  handle_in_use[device_place(device_index)] = handle;
}

void check_error_record(const Tensor& on_device, int64_t handle) {
  const int32_t device_index = on_device.get_device_index();
  DeviceRecords& records = records_of(device_index);
  Report first{};
  {
    const std::lock_guard<std::mutex> lock(records.mutex);
    if (!take_first(other_record(records, handle), records.cores, first))
      return;
  }
  raise(first, device_index, "");
}

// The caller has waited for all that may report into it.
void free_error_record(const Tensor& on_device, int64_t handle) {
  DeviceRecords& records = records_of(on_device.get_device_index());
  const std::lock_guard<std::mutex> lock(records.mutex);
  (void)other_record(records, handle);
  if (std::find(records.free_handles.begin(), records.free_handles.end(), handle) != records.free_handles.end())
    throw std::invalid_argument(concat("[error_record] record ", handle, " was freed before."));
  records.free_handles.push_back(handle);
}

}  // namespace hicache
