#include "device_state.h"

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "kv_exchange_params.h"
#include "runtime.h"

namespace hicache {
namespace {

constexpr int kMaxDevices = 128;
constexpr int kVectorCoreNum = 201;  // ACL_DEV_ATTR_VECTOR_CORE_NUM
constexpr int kBufferSize = 204;     // ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE
constexpr int kCapabilityVectorCores = 1;
constexpr int64_t kSmallestBuffer = 196608;  // 910B and 910_93; the 950 has 253952
constexpr int kMallocHugeFirst = 0;

struct DeviceState {
  std::mutex mutex;  // guards creation and clearing
  std::unique_ptr<Chip> chip;
  std::atomic<char*> device_lines{nullptr};
  const volatile int64_t* host_lines = nullptr;  // page-locked copy of what the cores wrote
  int64_t cores = 0;
  std::vector<int64_t> seen;  // by core: the number of the last report that was thrown, or passed over
  std::atomic<int64_t> calls{0};
};

// Never destroyed: copies of the record may arrive while the process exits.
DeviceState& device_state(int32_t device_index) {
  static auto* states = new std::array<DeviceState, kMaxDevices>;
  if (device_index < 0 || device_index >= kMaxDevices)
    throw std::runtime_error(
        concat("[transfer_kv] device index ", device_index, " is beyond what this build can hold."));
  return (*states)[device_index];
}

Chip read_chip(int32_t device_index) {
  const auto device = static_cast<uint32_t>(device_index);
  const auto info = [&](int attribute) {
    int64_t value = 0;
    const bool known = driver().device_info != nullptr && driver().device_info(device, attribute, &value) == 0;
    return known ? value : 0;
  };
  Chip chip{info(kVectorCoreNum), info(kBufferSize)};
  if (chip.vector_cores <= 0 && driver().device_capability != nullptr)
    check_acl(driver().device_capability(device, kCapabilityVectorCores, &chip.vector_cores),
              "aclGetDeviceCapability");
  if (chip.vector_cores <= 0)
    throw std::runtime_error("[transfer_kv] this CANN does not tell how many AI-vector cores the device has.");
  if (chip.buffer_bytes <= 0)
    chip.buffer_bytes = kSmallestBuffer;
  return chip;
}

size_t record_bytes(int64_t cores) {
  return static_cast<size_t>(2 * cores * kErrorLineBytes);
}

void create(DeviceState& state, int64_t cores) {
  void *host = nullptr, *device = nullptr;
  check_acl(driver().malloc_host(&host, record_bytes(cores)), "aclrtMallocHost for the error record");
  check_acl(driver().malloc_device(&device, record_bytes(cores), kMallocHugeFirst),
            "aclrtMalloc for the error record");
  std::memset(host, 0, record_bytes(cores));
  check_acl(driver().memset(device, record_bytes(cores), 0, record_bytes(cores)), "aclrtMemset");
  state.host_lines = static_cast<const volatile int64_t*>(host);
  state.cores = cores;
  state.seen.assign(static_cast<size_t>(cores), 0);
  state.device_lines.store(static_cast<char*>(device));
}

struct Report {
  int64_t what, call, position, value, limit;
  bool is_before(const Report& other) const {
    return call < other.call || (call == other.call && position < other.position);
  }
};

// The first of what the cores have reported since the last time.
bool take_first(DeviceState& state, Report& first) {
  bool found = false;
  for (int64_t core = 0; core < state.cores; ++core) {
    const volatile int64_t* line = state.host_lines + (state.cores + core) * kErrorWords;
    const int64_t sequence = line[kErrorSequence];
    if (sequence == state.seen[static_cast<size_t>(core)])
      continue;
    state.seen[static_cast<size_t>(core)] = sequence;
    const Report report{line[kErrorWhat], line[kErrorCall], line[kErrorPosition], line[kErrorValue],
                        line[kErrorLimit]};
    if (!found || report.is_before(first))
      first = report;
    found = true;
  }
  return found;
}

}  // namespace

const Chip& chip_of(int32_t device_index) {
  DeviceState& state = device_state(device_index);
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (state.chip == nullptr)
    state.chip = std::make_unique<Chip>(read_chip(device_index));
  return *state.chip;
}

ErrorSink next_error_sink(int32_t device_index) {
  const int64_t cores = chip_of(device_index).vector_cores;
  DeviceState& state = device_state(device_index);
  if (state.device_lines.load() == nullptr) {
    const std::lock_guard<std::mutex> guard(state.mutex);
    if (state.device_lines.load() == nullptr)
      create(state, cores);
  }
  return {reinterpret_cast<int64_t>(state.device_lines.load()), cores, ++state.calls};
}

void fetch_errors(int32_t device_index, void* stream) {
  DeviceState& state = device_state(device_index);
  const size_t nbytes = record_bytes(state.cores);
  check_acl(driver().memcpy_async(const_cast<int64_t*>(state.host_lines), nbytes, state.device_lines.load(),
                                  nbytes, kDeviceToHost, stream),
            "aclrtMemcpyAsync of the error record");
}

void throw_recorded_error(int32_t device_index, void* stream, bool is_later_call) {
  DeviceState& state = device_state(device_index);
  if (state.device_lines.load() == nullptr)
    return;
  Report first{};
  {
    const std::lock_guard<std::mutex> guard(state.mutex);
    if (!take_first(state, first))
      return;
    const auto flags = static_cast<size_t>(state.cores * kErrorLineBytes);
    check_acl(driver().memset_async(state.device_lines.load(), flags, 0, flags, stream), "aclrtMemsetAsync");
  }
  const std::string call_text = concat("[transfer_kv] ", is_later_call ? "an earlier call failed: " : "",
                                       "call ", first.call, " on npu:", device_index, ": ");
  if (first.what == kBadCount)
    throw std::out_of_range(
        concat(call_text, "count is ", first.value, ", outside 0 to ", first.limit, ", and was clamped."));
  const char* name = first.what == kBadDstIndex ? "dst_indices[" : "src_indices[";
  throw std::out_of_range(concat(call_text, name, first.position, "] is ", first.value, ", out of range for ",
                                 first.limit,
                                 " slots (-1 skips an entry). The entry was skipped, the others were copied."));
}

// Waits for the work on the current stream, so that the transfers before this call have reported.
void check_errors_ascend(const Tensor& on_device) {
  const int32_t device_index = on_device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  void* stream = current_stream(device_index);
  if (is_capturing(stream))
    return;
  if (device_state(device_index).device_lines.load() != nullptr)
    fetch_errors(device_index, stream);  // replays of a captured graph run no host code that would
  check_acl(driver().synchronize_stream(stream), "aclrtSynchronizeStream");
  throw_recorded_error(device_index, stream, /*is_later_call=*/false);
}

}  // namespace hicache
