// libascend_hal: what Memfabric asks of the driver below CANN to give the host memory that a device reaches.
// Address space is reserved, physical memory created, mapped there and registered; the device then has an
// address of its own for it.
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "sim.h"

namespace {

std::mutex mutex;
std::map<void*, size_t> reserved;
std::map<void*, size_t> mapped;

}  // namespace

SIM_API int halMemAddressReserve(void** address, size_t nbytes, size_t, void* wanted, uint64_t) {
  SIM_ENTER();
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (wanted != nullptr ? MAP_FIXED_NOREPLACE : 0);
  void* at = mmap(wanted, nbytes, PROT_NONE, flags, -1, 0);
  if (at == MAP_FAILED)
    return sim::kOutOfMemory;
  *address = at;
  const std::lock_guard<std::mutex> lock(mutex);
  reserved[at] = nbytes;
  return sim::kSuccess;
}
SIM_API int halMemAddressFree(void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = reserved.find(address);
  if (at == reserved.end())
    return sim::kInvalidParam;
  munmap(address, at->second);
  reserved.erase(at);
  return sim::kSuccess;
}
SIM_API int halMemCreate(void** handle, size_t nbytes, const void*, uint64_t) {
  SIM_ENTER();
  *handle = new size_t(nbytes);
  return sim::kSuccess;
}
SIM_API int halMemRelease(void* handle) {
  delete static_cast<size_t*>(handle);
  return sim::kSuccess;
}
SIM_API int halMemMap(void* address, size_t nbytes, size_t, void*, uint64_t) {
  SIM_ENTER();
  if (mprotect(address, nbytes, PROT_READ | PROT_WRITE) != 0)
    return sim::kOutOfMemory;
  sim::map_host(address, address, nbytes);  // an AI core sees it at the host's own address
  const std::lock_guard<std::mutex> lock(mutex);
  mapped[address] = nbytes;
  return sim::kSuccess;
}
SIM_API int halMemUnmap(void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto at = mapped.find(address);
  if (at == mapped.end())
    return sim::kInvalidParam;
  sim::unmap_host(address);
  // Gives the pages back; the address stays reserved.
  mmap(address, at->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped.erase(at);
  return sim::kSuccess;
}
SIM_API int halMemSetAccess(void*, size_t, void*, size_t) {
  return sim::kSuccess;
}
// Memory that is offered to other processes, though none takes it.
SIM_API int halMemExportToShareableHandleV2(void*, int, uint64_t, void*) {
  return sim::kSuccess;
}
SIM_API int halMemTransShareableHandle(int, void*, uint32_t*, uint64_t*) {
  return sim::kSuccess;
}
SIM_API int halMemShareHandleSetAttribute(uint64_t, int, void*) {
  return sim::kSuccess;
}
SIM_API int halHostRegister(void* host, uint64_t nbytes, uint32_t, uint32_t, void** device_address) {
  SIM_ENTER();
  *device_address = sim::register_host(host, nbytes);
  return *device_address != nullptr ? sim::kSuccess : sim::kOutOfMemory;
}
SIM_API int halHostUnregisterEx(void* host, uint32_t, uint32_t) {
  return sim::unregister_host(host) ? sim::kSuccess : sim::kInvalidParam;
}

// Of the runtime below libascendcl.
SIM_API int rtGetLogicDevIdByUserDevId(int32_t user, int32_t* logic) {
  *logic = user;
  return sim::kSuccess;
}
SIM_API int rtDeviceGetBareTgid(uint32_t* pid) {
  *pid = 1;
  return sim::kSuccess;
}
SIM_API int rtGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t* value) {
  *value = 0;
  return sim::kSuccess;
}
