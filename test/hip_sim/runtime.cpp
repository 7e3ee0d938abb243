// A libamdhip64 without a GPU, for tests of the host code: the functions that _hip.so and a torch device need.
//
// Streams run only when somebody waits for them, so a missing wait shows; those that HIP_SIM_EAGER is about run
// as far as their own waits let them, so a wait that is missing there shows. Kernels go to an executor:
// host-built bodies of the same source, or the interpreter of the compiled code. Settings come from the
// environment:
//
//   HIP_SIM_DEVICES    number of GPUs (1)
//   HIP_SIM_ARCH       what they are (gfx942): code for another one does not load
//   HIP_SIM_EXECUTOR   a library with hip_sim_execute()
//   HIP_SIM_CODE       a code object that takes the place of the program's own
//   HIP_SIM_NO_ALIAS   hipHostGetDevicePointer gives the host's address, which kernels can't use
#include <hip/hip_runtime_api.h>

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "code_objects.h"
#include "memory.h"
#include "runtime.h"

using hip_sim::Block;
using hip_sim::CodeObject;
using hip_sim::Kind;

struct Work {
  std::function<void()> run;
  const ihipEvent_t* event = nullptr;  // of a wait, with the record that it is for
  uint64_t record = 0;
};

struct ihipStream_t {
  std::deque<Work> work;
  bool has_priority = false;
  int depth = 0;  // of its work that is under way
};

// `recorded` and `happened` count records; a wait is for the newest record at the time of the call.
struct ihipEvent_t {
  ihipStream_t* stream = nullptr;
  uint64_t recorded = 0;
  uint64_t happened = 0;
  int queries = 0;  // of the newest record
};

namespace {

using Failure = std::pair<hipError_t, int>;  // the error, and how many calls still succeed

struct Kernel {
  std::string name;
  const std::map<std::string, CodeObject>* objects;
};

struct Simulator {
  std::recursive_mutex mutex;
  hip_sim::Memory memory;
  std::set<ihipStream_t*> streams;
  ihipStream_t null_stream;
  std::map<const void*, Kernel> kernels;
  std::map<const void*, std::pair<Kernel, size_t>> variables;
  std::map<const void*, void*> variable_addresses;
  std::map<std::string, Failure> failures;
  long waits = 0;
  long lost_wait = 0;
  bool is_eager = false;
  hip_sim::Execute execute = nullptr;
  long launches = 0;
};

Simulator& simulator() {
  static auto* instance = new Simulator;
  return *instance;
}

thread_local hipError_t last_error = hipSuccess;
thread_local int current_device = 0;
thread_local bool is_capturing = false;

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

hipError_t result(hipError_t error) {
  if (error != hipSuccess)
    last_error = error;
  return error;
}

// The error that a test wants this call to give.
hipError_t wanted_failure(const char* function) {
  auto found = simulator().failures.find(function);
  if (found == simulator().failures.end() || found->second.second-- > 0)
    return hipSuccess;
  const hipError_t error = found->second.first;
  simulator().failures.erase(found);
  return result(error);
}

#define HIP_SIM_ENTER(function)                                        \
  const std::lock_guard<std::recursive_mutex> lock(simulator().mutex); \
  if (const hipError_t wanted = wanted_failure(#function))             \
  return wanted

// The GPU works. Locks again also when an executor throws.
struct Working {
  Working() {
    simulator().memory.unlock();
  }
  ~Working() {
    simulator().memory.lock();
  }
};

void run_eager();

template <typename IsEnough>
void run(ihipStream_t* stream, const IsEnough& is_enough) {
  if (stream->work.empty())
    return;
  const Working working;
  while (!stream->work.empty() && !is_enough()) {
    const auto work = std::move(stream->work.front());
    stream->work.pop_front();
    ++stream->depth;
    work.run();  // may run other streams, up to an event that was recorded before this work was queued
    --stream->depth;
    run_eager();
  }
}

// The streams that run at once, as far as their waits let them.
void run_eager() {
  if (!simulator().is_eager)
    return;
  for (ihipStream_t* stream : simulator().streams)
    if (stream->has_priority && stream->depth == 0)
      run(stream, [stream] {
        const Work& next = stream->work.front();
        return next.event != nullptr && next.event->happened < next.record;
      });
}

void run(ihipStream_t* stream) {
  run(stream, [] { return false; });
}

// Up to a record of the event, and no further: what lies behind it is not waited for.
void run_until(ihipEvent_t* event, uint64_t record) {
  run(event->stream, [=] { return event->happened >= record; });
}

void run_all() {
  run(&simulator().null_stream);
  for (ihipStream_t* stream : simulator().streams)
    run(stream);
}

ihipStream_t* resolve(hipStream_t stream) {
  return stream == nullptr ? &simulator().null_stream : stream;
}

void enqueue(hipStream_t on, Work work) {
  resolve(on)->work.push_back(std::move(work));
  run_eager();
}

// An address that the GPU may use while it works: of the device, or the alias of mapped host memory.
char* reachable(const void* address) {
  if (const Block* block = simulator().memory.find_host(address))
    return block->device + (static_cast<const char*>(address) - block->host);
  return static_cast<char*>(const_cast<void*>(address));
}

void copy_now(void* dst, const void* src, size_t nbytes) {
  std::memmove(reachable(dst), reachable(src), nbytes);
}

const CodeObject* code_of(const Kernel& kernel) {
  if (const char* path = std::getenv("HIP_SIM_CODE")) {
    static auto* other = [path] {
      std::ifstream file(path, std::ios::binary);
      return new CodeObject{{std::istreambuf_iterator<char>(file), {}}};
    }();
    return other;
  }
  const auto found = kernel.objects->find(setting("HIP_SIM_ARCH", "gfx942"));
  return found == kernel.objects->end() ? nullptr : &found->second;
}

struct FatBinary {
  uint32_t magic, version;
  const char* bundle;
  void* unused;
};

}  // namespace

// --- For the tests -------------------------------------------------------------------------------

extern "C" {

// The call number `after` + 1 of `function` from now on fails with `error`.
void hip_sim_fail(const char* function, int error, int after) {
  simulator().failures[function] = {static_cast<hipError_t>(error), after};
}
int hip_sim_pending_error() {
  return last_error;
}
long hip_sim_launches() {
  return simulator().launches;
}
size_t hip_sim_waiting() {
  size_t waiting = simulator().null_stream.work.size();
  for (const ihipStream_t* stream : simulator().streams)
    waiting += stream->work.size();
  return waiting;
}
// Whether streams with a priority, which are those of _hip.so, run as early as they may.
void hip_sim_set_eager(int eager) {
  simulator().is_eager = eager != 0;
}
// From now on the call number `number` of hipStreamWaitEvent does nothing. Returns the calls before.
long hip_sim_lose_wait(long number) {
  simulator().lost_wait = number;
  return std::exchange(simulator().waits, 0);
}
void hip_sim_set_capturing(int capturing) {
  is_capturing = capturing != 0;
}
// The device of torch lets the CPU work on the GPU's bytes: between the two no other thread may.
void hip_sim_unlock() {
  simulator().mutex.lock();
  simulator().memory.unlock();
}
void hip_sim_lock() {
  simulator().memory.lock();
  simulator().mutex.unlock();
}
// As hipEventQuery, but a look only.
int hip_sim_has_happened(hipEvent_t event) {
  const std::lock_guard<std::recursive_mutex> lock(simulator().mutex);
  return event->happened >= event->recorded;
}
int hip_sim_is_device_range(const void* address, size_t nbytes) {
  return simulator().memory.is_device_range(address, nbytes);
}

// --- Kernels and variables -----------------------------------------------------------------------

void** __hipRegisterFatBinary(const void* data) {
  const auto* binary = static_cast<const FatBinary*>(data);
  return reinterpret_cast<void**>(new std::map<std::string, CodeObject>(hip_sim::unbundle(binary->bundle)));
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(void** modules, const void* host, char*, const char* name, unsigned, void*, void*,
                           void*, void*, int*) {
  simulator().kernels[host] = {name, reinterpret_cast<std::map<std::string, CodeObject>*>(modules)};
}
void __hipRegisterVar(void** modules, void* host, char*, const char* name, int, size_t nbytes, int, int) {
  simulator().variables[host] = {{name, reinterpret_cast<std::map<std::string, CodeObject>*>(modules)}, nbytes};
}
hipError_t __hipPopCallConfiguration(dim3*, dim3*, size_t*, hipStream_t*) {
  return hipErrorInvalidConfiguration;  // `<<<>>>` is not used
}

hipError_t hipLaunchKernel(const void* function, dim3 blocks, dim3 threads, void** arguments, size_t,
                           hipStream_t stream) {
  HIP_SIM_ENTER(hipLaunchKernel);
  const auto found = simulator().kernels.find(function);
  if (found == simulator().kernels.end())
    return result(hipErrorInvalidDeviceFunction);
  const CodeObject* code = code_of(found->second);
  if (code == nullptr)
    return result(hipErrorNoBinaryForGpu);
  if (blocks.x == 0 || threads.x == 0 || threads.x > 1024)
    return result(hipErrorInvalidConfiguration);
  if (simulator().execute == nullptr) {
    void* library = dlopen(setting("HIP_SIM_EXECUTOR", "").c_str(), RTLD_NOW | RTLD_LOCAL);
    simulator().execute =
        library == nullptr ? nullptr : reinterpret_cast<hip_sim::Execute>(dlsym(library, "hip_sim_execute"));
    if (simulator().execute == nullptr)
      return result(hipErrorSharedObjectInitFailed);
  }
  const std::string name = found->second.name;
  const auto* parameters = static_cast<const char*>(arguments[0]);
  auto launch = std::make_shared<hip_sim::Launch>();
  launch->kernel = name;
  launch->arch = setting("HIP_SIM_ARCH", "gfx942");
  launch->code = code;
  launch->blocks = blocks.x;
  launch->threads = threads.x;
  launch->parameters.assign(parameters, parameters + code->parameter_bytes(name));
  launch->is_device_range = hip_sim_is_device_range;
  ++simulator().launches;
  enqueue(stream, {[launch] { simulator().execute(*launch); }});
  return hipSuccess;
}

hipError_t hipGetSymbolAddress(void** address, const void* symbol) {
  HIP_SIM_ENTER(hipGetSymbolAddress);
  const auto found = simulator().variables.find(symbol);
  if (found == simulator().variables.end())
    return result(hipErrorInvalidSymbol);
  if (code_of(found->second.first) == nullptr)
    return result(hipErrorNoBinaryForGpu);
  void*& known = simulator().variable_addresses[symbol];
  if (known == nullptr)
    known = simulator().memory.allocate_device(found->second.second)->device;  // zero, as fresh mappings are
  *address = known;
  return hipSuccess;
}

// --- Devices and errors --------------------------------------------------------------------------

hipError_t hipGetDeviceCount(int* count) {
  HIP_SIM_ENTER(hipGetDeviceCount);
  *count = std::atoi(setting("HIP_SIM_DEVICES", "1").c_str());
  return *count > 0 ? hipSuccess : result(hipErrorNoDevice);
}
hipError_t hipGetDevice(int* device) {
  *device = current_device;
  return hipSuccess;
}
hipError_t hipSetDevice(int device) {
  int count = 0;
  (void)hipGetDeviceCount(&count);
  if (device < 0 || device >= count)
    return result(hipErrorInvalidDevice);
  current_device = device;
  return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  HIP_SIM_ENTER(hipDeviceGetAttribute);
  if (attribute != hipDeviceAttributeMultiprocessorCount)
    return result(hipErrorInvalidValue);
  *value = 304;
  return hipSuccess;
}
hipError_t hipGetLastError() {
  return std::exchange(last_error, hipSuccess);
}

// --- Memory --------------------------------------------------------------------------------------

hipError_t hipMalloc(void** address, size_t nbytes) {
  HIP_SIM_ENTER(hipMalloc);
  const Block* block = simulator().memory.allocate_device(nbytes);
  *address = block == nullptr ? nullptr : block->device;
  return block == nullptr ? result(hipErrorOutOfMemory) : hipSuccess;
}
hipError_t hipFree(void* address) {
  HIP_SIM_ENTER(hipFree);
  run_all();
  if (Block* block = simulator().memory.find_device(address))
    simulator().memory.release(block);
  return hipSuccess;
}
hipError_t hipFreeAsync(void* address, hipStream_t stream) {
  HIP_SIM_ENTER(hipFreeAsync);
  enqueue(stream, {[address] {
            if (Block* block = simulator().memory.find_device(address))
              simulator().memory.release(block);
          }});
  return hipSuccess;
}
hipError_t hipHostMalloc(void** address, size_t nbytes, unsigned) {
  HIP_SIM_ENTER(hipHostMalloc);
  const Block* block = simulator().memory.allocate_host(nbytes);
  *address = block == nullptr ? nullptr : block->host;
  return block == nullptr ? result(hipErrorOutOfMemory) : hipSuccess;
}
hipError_t hipHostFree(void* address) {
  HIP_SIM_ENTER(hipHostFree);
  run_all();
  Block* block = simulator().memory.find_host(address);
  if (block == nullptr || block->host != address || block->kind != Kind::kAllocatedHost)
    return result(hipErrorInvalidValue);
  simulator().memory.release(block);
  return hipSuccess;
}
hipError_t hipHostRegister(void* address, size_t nbytes, unsigned) {
  HIP_SIM_ENTER(hipHostRegister);
  char* host = static_cast<char*>(address);
  if (nbytes == 0)
    return result(hipErrorInvalidValue);
  if (simulator().memory.find_host(host) != nullptr ||
      simulator().memory.find_host(host + nbytes - 1) != nullptr)
    return result(hipErrorHostMemoryAlreadyRegistered);
  return simulator().memory.register_host(host, nbytes) == nullptr ? result(hipErrorOutOfMemory) : hipSuccess;
}
// What is still queued loses the memory, as on a GPU.
hipError_t hipHostUnregister(void* address) {
  HIP_SIM_ENTER(hipHostUnregister);
  Block* block = simulator().memory.find_host(address);
  if (block == nullptr || block->host != address || block->kind != Kind::kRegisteredHost)
    return result(hipErrorHostMemoryNotRegistered);
  simulator().memory.release(block);
  return hipSuccess;
}
hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned) {
  HIP_SIM_ENTER(hipHostGetDevicePointer);
  const Block* block = simulator().memory.find_host(host);
  if (block == nullptr)
    return result(hipErrorInvalidValue);
  *device = std::getenv("HIP_SIM_NO_ALIAS") != nullptr
                ? host
                : block->device + (static_cast<char*>(host) - block->host);
  return hipSuccess;
}
hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* address) {
  HIP_SIM_ENTER(hipPointerGetAttributes);
  *attributes = {};
  const Block* block = simulator().memory.find_host(address);
  if (block == nullptr)
    block = simulator().memory.find_device(address);
  if (block == nullptr)
    return result(hipErrorInvalidValue);
  attributes->type = block->kind == Kind::kDevice ? hipMemoryTypeDevice : hipMemoryTypeHost;
  return hipSuccess;
}
bool is_pageable(const void* address) {
  return simulator().memory.find_host(address) == nullptr && simulator().memory.find_device(address) == nullptr;
}
hipError_t hipMemcpyAsync(void* dst, const void* src, size_t nbytes, hipMemcpyKind, hipStream_t stream) {
  HIP_SIM_ENTER(hipMemcpyAsync);
  enqueue(stream, {[=] { copy_now(dst, src, nbytes); }});
  if (is_pageable(dst) || is_pageable(src))
    run(resolve(stream));
  return hipSuccess;
}
hipError_t hipMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                            size_t height, hipMemcpyKind, hipStream_t stream) {
  HIP_SIM_ENTER(hipMemcpy2DAsync);
  if (width > dst_pitch || width > src_pitch)
    return result(hipErrorInvalidPitchValue);
  enqueue(stream, {[=] {
            for (size_t row = 0; row < height; ++row)
              copy_now(static_cast<char*>(dst) + row * dst_pitch,
                       static_cast<const char*>(src) + row * src_pitch, width);
          }});
  if (is_pageable(dst) || is_pageable(src))
    run(resolve(stream));
  return hipSuccess;
}
hipError_t hipMemsetAsync(void* address, int value, size_t nbytes, hipStream_t stream) {
  HIP_SIM_ENTER(hipMemsetAsync);
  enqueue(stream, {[=] { std::memset(reachable(address), value, nbytes); }});
  return hipSuccess;
}

// --- Streams and events --------------------------------------------------------------------------

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) {
  HIP_SIM_ENTER(hipStreamCreateWithFlags);
  *stream = new ihipStream_t;
  simulator().streams.insert(*stream);
  return hipSuccess;
}
hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  HIP_SIM_ENTER(hipDeviceGetStreamPriorityRange);
  *least = 1;
  *greatest = -1;
  return hipSuccess;
}
hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
  HIP_SIM_ENTER(hipStreamCreateWithPriority);
  if (priority < -1 || priority > 1)
    return result(hipErrorInvalidValue);
  const hipError_t created = hipStreamCreateWithFlags(stream, flags);
  if (created == hipSuccess)
    (*stream)->has_priority = true;
  return created;
}
hipError_t hipStreamSynchronize(hipStream_t stream) {
  HIP_SIM_ENTER(hipStreamSynchronize);
  run(resolve(stream));
  return hipSuccess;
}
hipError_t hipStreamQuery(hipStream_t stream) {
  HIP_SIM_ENTER(hipStreamQuery);
  return resolve(stream)->work.empty() ? hipSuccess : hipErrorNotReady;
}
hipError_t hipDeviceSynchronize() {
  HIP_SIM_ENTER(hipDeviceSynchronize);
  run_all();
  return hipSuccess;
}
hipError_t hipStreamIsCapturing(hipStream_t, hipStreamCaptureStatus* status) {
  HIP_SIM_ENTER(hipStreamIsCapturing);
  *status = is_capturing ? hipStreamCaptureStatusActive : hipStreamCaptureStatusNone;
  return hipSuccess;
}
hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
  HIP_SIM_ENTER(hipThreadExchangeStreamCaptureMode);
  static thread_local hipStreamCaptureMode current = hipStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return hipSuccess;
}
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned) {
  HIP_SIM_ENTER(hipEventCreateWithFlags);
  *event = new ihipEvent_t;
  return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  HIP_SIM_ENTER(hipEventRecord);
  event->stream = resolve(stream);
  event->queries = 0;
  enqueue(stream, {[event, record = ++event->recorded] { event->happened = record; }});
  return hipSuccess;
}
hipError_t hipEventSynchronize(hipEvent_t event) {
  HIP_SIM_ENTER(hipEventSynchronize);
  if (event->happened < event->recorded)
    run_until(event, event->recorded);
  return hipSuccess;
}
// Who asks again and again waits, too.
hipError_t hipEventQuery(hipEvent_t event) {
  HIP_SIM_ENTER(hipEventQuery);
  constexpr int kPatience = 3;
  if (event->happened < event->recorded && ++event->queries > kPatience)
    run_until(event, event->recorded);
  return event->happened >= event->recorded ? hipSuccess : hipErrorNotReady;
}
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
  HIP_SIM_ENTER(hipStreamWaitEvent);
  if (++simulator().waits == simulator().lost_wait)
    return hipSuccess;
  if (event->happened < event->recorded)
    enqueue(stream, {[event, record = event->recorded] { run_until(event, record); }, event, event->recorded});
  return hipSuccess;
}
// The event itself is left behind: queued work may still name it.
hipError_t hipEventDestroy(hipEvent_t) {
  return hipSuccess;
}

}  // extern "C"
