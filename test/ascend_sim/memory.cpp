// Which memory exists, who may touch it, and where its bytes are.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "sim.h"

namespace sim {
namespace {

struct Region {
  Kind kind;
  size_t nbytes;
  char* bytes;        // where the simulator reads and writes them
  char* reservation;  // with a guard page on either side
  size_t reserved;
  int device;
  int file;  // of device memory: pages exist from their first use on
};

// New device memory up to this size holds garbage, larger has no pages yet.
constexpr size_t kMaxGarbage = 1 << 20;

std::mutex mutex;
// By the address that users know: a device address, or the host's of pinned memory.
std::map<const char*, Region> regions;
std::map<const char*, const char*> device_address_of_host;  // registered and mapped memory
size_t in_use[kDevices];

size_t pages(size_t nbytes) {
  return (nbytes + kPage - 1) / kPage * kPage;
}

// Address space with a guard page in front and behind.
char* reserve(size_t nbytes, char** reservation) {
  void* at = mmap(nullptr, nbytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    return nullptr;
  *reservation = static_cast<char*>(at);
  return *reservation + kPage;
}

std::map<const char*, Region>::iterator containing(const void* address, size_t nbytes) {
  const char* begin = static_cast<const char*>(address);
  auto at = regions.upper_bound(begin);
  if (at == regions.begin())
    return regions.end();
  --at;
  return begin + nbytes <= at->first + at->second.nbytes ? at : regions.end();
}

void* add_mapping(void* host, const char* device_address, char* reservation, size_t reserved, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  device_address_of_host[static_cast<char*>(host)] = device_address;
  regions[device_address] = {
      Kind::kRegistered, nbytes, static_cast<char*>(host), reservation, reserved, -1, -1};
  return const_cast<char*>(device_address);
}

}  // namespace

void* allocate_device(size_t nbytes, int device) {
  const size_t size = pages(nbytes == 0 ? 1 : nbytes);
  const int file = memfd_create("sim_device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0)
    return nullptr;
  char *reservation, *alias_reservation;
  char* address = reserve(size, &reservation);
  char* bytes = reserve(size, &alias_reservation);
  if (bytes != nullptr)
    bytes = static_cast<char*>(mmap(bytes, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0));
  if (address == nullptr || bytes == nullptr || bytes == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  if (size <= kMaxGarbage)
    std::memset(bytes, 0xA5, size);
  const std::lock_guard<std::mutex> lock(mutex);
  regions[address] = {Kind::kDevice, size, bytes, reservation, size + 2 * kPage, device, file};
  in_use[device] += size;
  return address;
}

bool free_device(void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = regions.find(static_cast<char*>(address));
  if (at == regions.end() || at->second.kind != Kind::kDevice)
    return false;
  const Region& region = at->second;
  in_use[region.device] -= region.nbytes;
  close(region.file);
  munmap(region.bytes - kPage, region.reserved);
  munmap(region.reservation, region.reserved);
  regions.erase(at);
  return true;
}

void* allocate_pinned(size_t nbytes) {
  const size_t size = pages(nbytes == 0 ? 1 : nbytes);
  char* reservation;
  char* address = reserve(size, &reservation);
  if (address == nullptr || mprotect(address, size, PROT_READ | PROT_WRITE) != 0)
    return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  regions[address] = {Kind::kPinned, size, address, reservation, size + 2 * kPage, -1, -1};
  return address;
}

bool free_pinned(void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = regions.find(static_cast<char*>(address));
  if (at == regions.end() || at->second.kind != Kind::kPinned)
    return false;
  munmap(at->second.reservation, at->second.reserved);
  regions.erase(at);
  return true;
}

void* register_host(void* host, size_t nbytes) {
  char* reservation;
  const size_t size = pages(nbytes);
  const char* device_address = reserve(size, &reservation);
  if (device_address == nullptr)
    return nullptr;
  return add_mapping(host, device_address, reservation, size + 2 * kPage, nbytes);
}

bool unregister_host(void* host) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = device_address_of_host.find(static_cast<char*>(host));
  if (known == device_address_of_host.end())
    return false;
  const auto at = regions.find(known->second);
  if (at->second.reservation != nullptr)
    munmap(at->second.reservation, at->second.reserved);
  regions.erase(at);
  device_address_of_host.erase(known);
  return true;
}

void map_host(void* host, void* device_address, size_t nbytes) {
  add_mapping(host, static_cast<char*>(device_address), nullptr, 0, nbytes);
}

void unmap_host(void* host) {
  (void)unregister_host(host);
}

char* find(const void* address, size_t nbytes, Reach reach) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto at = containing(address, nbytes); at != regions.end()) {
    if (reach == Reach::kAiCore && at->second.kind == Kind::kPinned)
      return nullptr;
    return at->second.bytes + (static_cast<const char*>(address) - at->first);
  }
  if (reach == Reach::kAiCore)
    return nullptr;
  // A copy engine also takes the host's address of registered memory.
  const char* begin = static_cast<const char*>(address);
  auto known = device_address_of_host.upper_bound(begin);
  if (known == device_address_of_host.begin())
    return nullptr;
  --known;
  const Region& region = regions.at(known->second);
  return begin + nbytes <= known->first + region.nbytes ? const_cast<char*>(begin) : nullptr;
}

void zero(char* bytes, size_t nbytes) {
  char* first = reinterpret_cast<char*>(pages(reinterpret_cast<size_t>(bytes)));
  char* last = reinterpret_cast<char*>(reinterpret_cast<size_t>(bytes + nbytes) / kPage * kPage);
  if (first >= last || madvise(first, static_cast<size_t>(last - first), MADV_REMOVE) != 0) {
    std::memset(bytes, 0, nbytes);
    return;
  }
  std::memset(bytes, 0, static_cast<size_t>(first - bytes));
  std::memset(last, 0, static_cast<size_t>(bytes + nbytes - last));
}

bool is_device(const void* address, int* device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = containing(address, 1);
  if (at == regions.end() || at->second.kind != Kind::kDevice)
    return false;
  if (device != nullptr)
    *device = at->second.device;
  return true;
}

bool is_host_known(const void* address) {
  int device;
  return !is_device(address, &device) && find(address, 1, Reach::kCopy) != nullptr;
}

size_t device_bytes_in_use(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  return in_use[device];
}

}  // namespace sim

// For tests: the bytes of any known memory, past the host's protection.
SIM_API int sim_read(const void* address, size_t nbytes, void* out) {
  const char* bytes = sim::find(address, nbytes, sim::Reach::kCopy);
  if (bytes == nullptr)
    return sim::kInvalidParam;
  std::memcpy(out, bytes, nbytes);
  return sim::kSuccess;
}

// The first stretch at or behind a device address that was ever used, as distances from it; 0 and 0: none.
SIM_API int sim_used(const void* address, size_t* begin, size_t* end) {
  const std::lock_guard<std::mutex> lock(sim::mutex);
  const auto at = sim::containing(address, 1);
  if (at == sim::regions.end() || at->second.kind != sim::Kind::kDevice)
    return sim::kInvalidParam;
  const off_t from = static_cast<const char*>(address) - at->first;
  const off_t data = lseek(at->second.file, from, SEEK_DATA);
  *begin = data < 0 ? 0 : static_cast<size_t>(data - from);
  *end = data < 0 ? 0 : static_cast<size_t>(lseek(at->second.file, data, SEEK_HOLE) - from);
  return sim::kSuccess;
}
