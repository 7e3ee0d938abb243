// A libamdhip64 without a GPU, for tests of the host code: the functions that _hip.so and a torch device need.
//
// Streams run only when somebody waits for them, so a missing wait shows. Kernels go to an executor: host-built
// bodies of the same source, or the interpreter of the compiled code. Settings come from the environment:
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

struct ihipStream_t {
  std::deque<std::function<void()>> work;
  bool runs = false;
};

struct ihipEvent_t {
  ihipStream_t* stream = nullptr;
  bool happened = true;
  uint64_t generation = 0;
};

namespace {

struct Failure {
  hipError_t error;
  int after;  // calls that still succeed
};

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
  if (found == simulator().failures.end() || found->second.after-- > 0)
    return hipSuccess;
  const hipError_t error = found->second.error;
  simulator().failures.erase(found);
  return result(error);
}

#define HIP_SIM_ENTER(function)                                        \
  const std::lock_guard<std::recursive_mutex> lock(simulator().mutex); \
  if (const hipError_t wanted = wanted_failure(#function))             \
  return wanted

void run(ihipStream_t* stream) {
  if (stream->runs)
    return;  // waits for itself
  stream->runs = true;
  while (!stream->work.empty()) {
    const auto work = std::move(stream->work.front());
    stream->work.pop_front();
    try {
      work();
    } catch (...) {  // out of an executor: for the test to see
      stream->runs = false;
      throw;
    }
  }
  stream->runs = false;
}

void run_all() {
  run(&simulator().null_stream);
  for (ihipStream_t* stream : simulator().streams)
    run(stream);
}

ihipStream_t* resolve(hipStream_t stream) {
  return stream == nullptr ? &simulator().null_stream : stream;
}

// An address that the GPU may use while it works: of the device, or the alias of mapped host memory.
char* reachable(const void* address) {
  if (const Block* block = simulator().memory.find_host(address))
    return block->device + (static_cast<const char*>(address) - block->host);
  return static_cast<char*>(const_cast<void*>(address));
}

// The GPU works. Locks again also when an executor throws.
struct Working {
  Working() {
    simulator().memory.unlock();
  }
  ~Working() {
    simulator().memory.lock();
  }
};

void copy_now(void* dst, const void* src, size_t nbytes) {
  const Working working;
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
void hip_sim_set_capturing(int capturing) {
  is_capturing = capturing != 0;
}
void hip_sim_unlock() {
  simulator().memory.unlock();
}
void hip_sim_lock() {
  simulator().memory.lock();
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
  resolve(stream)->work.emplace_back([launch] {
    const Working working;
    simulator().execute(*launch);
  });
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
const char* hipGetErrorName(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "hipSuccess";
    case hipErrorInvalidValue:
      return "hipErrorInvalidValue";
    case hipErrorOutOfMemory:
      return "hipErrorOutOfMemory";
    case hipErrorNoBinaryForGpu:
      return "hipErrorNoBinaryForGpu";
    case hipErrorLaunchFailure:
      return "hipErrorLaunchFailure";
    case hipErrorNoDevice:
      return "hipErrorNoDevice";
    default:
      return "hipErrorUnknown";
  }
}
const char* hipGetErrorString(hipError_t error) {
  return error == hipErrorNoBinaryForGpu ? "no kernel image is available for execution on the device"
                                         : "simulated";
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
  resolve(stream)->work.emplace_back([address] {
    if (Block* block = simulator().memory.find_device(address))
      simulator().memory.release(block);
  });
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
hipError_t hipMemcpyAsync(void* dst, const void* src, size_t nbytes, hipMemcpyKind, hipStream_t stream) {
  HIP_SIM_ENTER(hipMemcpyAsync);
  resolve(stream)->work.emplace_back([=] { copy_now(dst, src, nbytes); });
  const auto is_pageable = [](const void* address) {
    return simulator().memory.find_host(address) == nullptr &&
           simulator().memory.find_device(address) == nullptr;
  };
  if (is_pageable(dst) || is_pageable(src))
    run(resolve(stream));
  return hipSuccess;
}

// --- Streams and events --------------------------------------------------------------------------

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned) {
  HIP_SIM_ENTER(hipStreamCreateWithFlags);
  *stream = new ihipStream_t;
  simulator().streams.insert(*stream);
  return hipSuccess;
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
  event->happened = false;
  const uint64_t generation = ++event->generation;
  event->stream->work.emplace_back([event, generation] {
    if (event->generation == generation)
      event->happened = true;
  });
  return hipSuccess;
}
// Everything of the event's stream runs, also what was queued behind it: no work here depends on less.
hipError_t hipEventSynchronize(hipEvent_t event) {
  HIP_SIM_ENTER(hipEventSynchronize);
  if (!event->happened)
    run(event->stream);
  return hipSuccess;
}
hipError_t hipEventQuery(hipEvent_t event) {
  HIP_SIM_ENTER(hipEventQuery);
  return event->happened ? hipSuccess : hipErrorNotReady;
}
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
  HIP_SIM_ENTER(hipStreamWaitEvent);
  if (!event->happened)
    resolve(stream)->work.emplace_back([other = event->stream] { run(other); });
  return hipSuccess;
}
// The event itself is left behind: queued work may still name it.
hipError_t hipEventDestroy(hipEvent_t) {
  return hipSuccess;
}

}  // extern "C"
