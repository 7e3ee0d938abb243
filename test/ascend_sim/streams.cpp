// Streams, events, and what tests may do to them: hold all streams, make a call fail, count calls.
#include <acl/acl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

using Clock = std::chrono::steady_clock;

struct Stream {
  int device = 0;
  int id = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t submitted = 0, completed = 0;
  int error = 0;
  bool stops = false;
  std::thread thread;
};

// An event may be recorded again or destroyed while a stream still waits for what it was: each record is
// a generation of its own, which those who wait for it share.
struct Generation {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point at;
};
struct Event {
  std::mutex mutex;
  std::shared_ptr<Generation> last;
};

std::mutex state_mutex;
std::condition_variable released;
bool held = false;
std::map<std::string, std::pair<int, int>> faults;  // name -> calls to let pass, error
std::map<std::string, int> calls;
int host_syncs = 0;
std::atomic<bool> captures{false};
std::vector<Stream*> streams;
Stream* default_streams[kDevices];
thread_local int device_of_thread = 0;

void wait_until_released() {
  std::unique_lock<std::mutex> lock(state_mutex);
  released.wait(lock, [] { return !held; });
}

void work(Stream* stream) {
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->changed.wait(lock, [&] { return stream->stops || !stream->tasks.empty(); });
      if (stream->tasks.empty())
        return;
      task = std::move(stream->tasks.front());
      stream->tasks.pop_front();
    }
    wait_until_released();
    device_of_thread = stream->device;
    const int error = task();
    task = nullptr;
    const std::lock_guard<std::mutex> lock(stream->mutex);
    if (error != 0 && stream->error == 0)
      stream->error = error;
    ++stream->completed;
    stream->changed.notify_all();
  }
}

Stream* create(int device) {
  auto* stream = new Stream;
  stream->device = device;
  const std::lock_guard<std::mutex> lock(state_mutex);
  stream->id = static_cast<int>(streams.size());
  streams.push_back(stream);
  stream->thread = std::thread(work, stream);
  return stream;
}

Stream* resolve(void* handle) {
  if (handle != nullptr)
    return static_cast<Stream*>(handle);
  Stream*& stream = default_streams[device_of_thread];
  if (stream == nullptr)
    stream = create(device_of_thread);
  return stream;
}

int append(Stream* stream, Task task) {
  const std::lock_guard<std::mutex> lock(stream->mutex);
  stream->tasks.push_back(std::move(task));
  ++stream->submitted;
  stream->changed.notify_all();
  return kSuccess;
}

// Until all that was submitted is done; the stream's error is given once.
int drain(Stream* stream) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  const uint64_t until = stream->submitted;
  stream->changed.wait(lock, [&] { return stream->completed >= until; });
  return std::exchange(stream->error, 0);
}

int synchronize(void* handle) {
  count_host_sync();
  return drain(resolve(handle));
}

int synchronize_device() {
  count_host_sync();
  std::vector<Stream*> all;
  {
    const std::lock_guard<std::mutex> lock(state_mutex);
    for (Stream* stream : streams)
      if (stream->device == device_of_thread)
        all.push_back(stream);
  }
  int error = 0;
  for (Stream* stream : all)
    if (const int of_stream = drain(stream); error == 0)
      error = of_stream;
  return error;
}

int destroy(Stream* stream) {
  {
    const std::lock_guard<std::mutex> lock(state_mutex);
    for (auto at = streams.begin(); at != streams.end(); ++at)
      if (*at == stream) {
        streams.erase(at);
        break;
      }
  }
  {
    const std::lock_guard<std::mutex> lock(stream->mutex);
    stream->stops = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return kSuccess;
}

std::shared_ptr<Generation> last_of(aclrtEvent event) {
  auto* known = static_cast<Event*>(event);
  const std::lock_guard<std::mutex> lock(known->mutex);
  return known->last;
}

void wait_for(Generation& generation) {
  std::unique_lock<std::mutex> lock(generation.mutex);
  generation.changed.wait(lock, [&] { return generation.done; });
}

bool is_done(aclrtEvent event) {
  const auto generation = last_of(event);
  if (generation == nullptr)
    return true;
  const std::lock_guard<std::mutex> lock(generation->mutex);
  return generation->done;
}

}  // namespace

int current_device() {
  return device_of_thread;
}

int submit(void* stream, Task task) {
  return append(resolve(stream), std::move(task));
}

void count_host_sync() {
  const std::lock_guard<std::mutex> lock(state_mutex);
  ++host_syncs;
}

int injected(const char* name) {
  const std::lock_guard<std::mutex> lock(state_mutex);
  ++calls[name];
  const auto fault = faults.find(name);
  if (fault == faults.end() || fault->second.first-- > 0)
    return 0;
  const int error = fault->second.second;
  faults.erase(fault);
  return error;
}

}  // namespace sim

using sim::Event;
using sim::Generation;
using sim::Stream;

// --- For tests ----------------------------------------------------------------------------------

// Lets the driver say that streams are being captured; nothing is.
SIM_API void sim_capture(int captures) {
  sim::captures = captures != 0;
}

// While held, no stream starts a task.
SIM_API void sim_hold(int holds) {
  const std::lock_guard<std::mutex> lock(sim::state_mutex);
  sim::held = holds != 0;
  sim::released.notify_all();
}

// The call of `name` after `passing` more ones fails, once.
SIM_API void sim_fail(const char* name, int passing, int error) {
  const std::lock_guard<std::mutex> lock(sim::state_mutex);
  sim::faults[name] = {passing, error};
}

SIM_API int sim_calls(const char* name) {
  const std::lock_guard<std::mutex> lock(sim::state_mutex);
  return sim::calls[name];
}

SIM_API int sim_host_syncs() {
  const std::lock_guard<std::mutex> lock(sim::state_mutex);
  return sim::host_syncs;
}

SIM_API void sim_forget() {
  const std::lock_guard<std::mutex> lock(sim::state_mutex);
  sim::calls.clear();
  sim::faults.clear();
  sim::host_syncs = 0;
}

// --- The driver's functions ---------------------------------------------------------------------

SIM_API aclError aclrtSetDevice(int32_t device) {
  SIM_ENTER();
  if (device < 0 || device >= sim::kDevices)
    return sim::kInvalidParam;
  sim::device_of_thread = device;
  return sim::kSuccess;
}
SIM_API aclError aclrtGetDevice(int32_t* device) {
  *device = sim::device_of_thread;
  return sim::kSuccess;
}
SIM_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(sim::device_of_thread + 1));
  return sim::kSuccess;
}
SIM_API aclError aclrtSetCurrentContext(aclrtContext context) {
  sim::device_of_thread = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return sim::kSuccess;
}

SIM_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  SIM_ENTER();
  *stream = sim::create(sim::device_of_thread);
  return sim::kSuccess;
}
SIM_API aclError aclrtCreateStream(aclrtStream* stream) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}
SIM_API aclError aclrtDestroyStream(aclrtStream stream) {
  return sim::destroy(static_cast<Stream*>(stream));
}
SIM_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return sim::destroy(static_cast<Stream*>(stream));
}
SIM_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = sim::resolve(stream)->id;
  return sim::kSuccess;
}
SIM_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Stream* stream = sim::resolve(handle);
  const std::lock_guard<std::mutex> lock(stream->mutex);
  *status = stream->completed == stream->submitted ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return sim::kSuccess;
}
SIM_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  SIM_ENTER();
  return sim::synchronize(stream);
}
SIM_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  SIM_ENTER();
  return sim::synchronize(stream);
}
SIM_API aclError aclrtSynchronizeDevice() {
  SIM_ENTER();
  return sim::synchronize_device();
}
SIM_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  SIM_ENTER();
  return sim::synchronize_device();
}

SIM_API aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  *status = sim::captures ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  *model = nullptr;
  return sim::kSuccess;
}

SIM_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  SIM_ENTER();
  *event = new Event;
  return sim::kSuccess;
}
SIM_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}
SIM_API aclError aclrtCreateEvent(aclrtEvent* event) {
  return aclrtCreateEventExWithFlag(event, 0);
}
SIM_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return sim::kSuccess;
}
SIM_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  SIM_ENTER();
  auto* known = static_cast<Event*>(event);
  auto generation = std::make_shared<Generation>();
  {
    const std::lock_guard<std::mutex> lock(known->mutex);
    known->last = generation;
  }
  return sim::submit(stream, [generation] {
    const std::lock_guard<std::mutex> lock(generation->mutex);
    generation->done = true;
    generation->at = sim::Clock::now();
    generation->changed.notify_all();
    return 0;
  });
}
SIM_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  SIM_ENTER();
  const auto generation = sim::last_of(event);
  if (generation == nullptr)
    return sim::kSuccess;
  return sim::submit(stream, [generation] {
    sim::wait_for(*generation);
    return 0;
  });
}
SIM_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  return sim::kSuccess;
}
SIM_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  SIM_ENTER();
  sim::count_host_sync();
  if (const auto generation = sim::last_of(event))
    sim::wait_for(*generation);
  return sim::kSuccess;
}
SIM_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  SIM_ENTER();
  *status = sim::is_done(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return sim::kSuccess;
}
SIM_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  *status = sim::is_done(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return sim::kSuccess;
}
SIM_API aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  const auto first = sim::last_of(start), last = sim::last_of(end);
  if (first == nullptr || last == nullptr || !sim::is_done(start) || !sim::is_done(end))
    return sim::kInvalidParam;
  *ms = std::chrono::duration<float, std::milli>(last->at - first->at).count();
  return sim::kSuccess;
}
SIM_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* args) {
  SIM_ENTER();
  return sim::submit(stream, [=] {
    function(args);
    return 0;
  });
}
