// A driver without an NPU: what the parts of the simulated libraries share. Real torch_npu and real
// Memfabric run on it, so its functions have the driver's names and the signatures of its headers.
//
// Device memory is a mapping that the host may not touch (PROT_NONE) with an alias that only the simulator
// knows; a stream is a thread; a copy or kernel finds its addresses when it runs, not when it is submitted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace sim {

constexpr int kDevices = 2;
constexpr size_t kPage = 4096;

// The driver's numbers that the simulator gives back.
constexpr int kSuccess = 0;
constexpr int kInvalidParam = 100000;
constexpr int kNotSupported = 207000;
constexpr int kOutOfMemory = 207001;
constexpr int kAiCoreException = 507015;
constexpr int kCopyException = 507899;

// --- memory.cpp ---------------------------------------------------------------------------------

enum class Kind {
  kDevice,      // address: PROT_NONE on the host
  kPinned,      // page-locked for copies, out of an AI core's reach
  kRegistered,  // host memory that an AI core reaches at a device address of its own
};

// Who uses an address: an AI core sees device addresses only, a copy engine also pinned host memory.
enum class Reach { kAiCore, kCopy };

void* allocate_device(size_t nbytes, int device);
bool free_device(void* address);
void* allocate_pinned(size_t nbytes);
bool free_pinned(void* address);
// The device's address of [host, host + nbytes), which is not the host's.
void* register_host(void* host, size_t nbytes);
bool unregister_host(void* host);
// Host memory known at a device address given from outside (Memfabric's).
void map_host(void* host, void* device_address, size_t nbytes);
void unmap_host(void* host);

// Where the simulator itself finds the bytes; null where `reach` has no right to all of them.
char* find(const void* address, size_t nbytes, Reach reach);
// Zeros what `find` gave; whole pages of device memory cost nothing until they are used again.
void zero(char* bytes, size_t nbytes);
bool is_device(const void* address, int* device);
bool is_host_known(const void* address);
size_t device_bytes_in_use(int device);

// --- streams.cpp --------------------------------------------------------------------------------

using Task = std::function<int()>;  // an error number of the driver, or 0

int current_device();
// Appends to a stream. Its thread runs the task; the first error stays with the stream.
int submit(void* stream, Task task);
// Counts a call that makes the host wait for a device.
void count_host_sync();
// The number that a test wants this call of `name` to return; 0 for none. Counts the call.
int injected(const char* name);

}  // namespace sim

#define SIM_API extern "C"
// First line of a function of the driver: counted, and failed on demand.
#define SIM_ENTER()                                         \
  do {                                                      \
    if (const int error = ::sim::injected(__func__); error) \
      return error;                                         \
  } while (0)
