// The rest of libascendcl: devices, memory, copies. Streams and events are in streams.cpp.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <cstdlib>
#include <cstring>

#include "sim.h"

namespace {

// A large chip; the tests need the numbers of an Atlas A3 for Memfabric's giant pages.
constexpr int64_t kVectorCores = 48;
constexpr int64_t kBufferBytes = 196608;
constexpr size_t kMemoryBytes = size_t{16} << 30;
constexpr size_t kMaxBatch = 4096;
constexpr size_t kMaxRectangleSide = 5 * 1024 * 1024;

int copy_now(char* dst, const char* src, size_t dst_pitch, size_t src_pitch, size_t width, size_t height) {
  for (size_t row = 0; row < height; ++row) {
    char* to = sim::find(dst + row * dst_pitch, width, sim::Reach::kCopy);
    const char* from = sim::find(src + row * src_pitch, width, sim::Reach::kCopy);
    if (to == nullptr || from == nullptr)
      return sim::kCopyException;
    std::memcpy(to, from, width);
  }
  return sim::kSuccess;
}

// The host's own memory needs no registration for a copy that blocks.
int copy_blocking(void* dst, const void* src, size_t nbytes) {
  const char* from = sim::find(src, nbytes, sim::Reach::kCopy);
  char* to = sim::find(dst, nbytes, sim::Reach::kCopy);
  if ((from == nullptr && sim::is_device(src, nullptr)) || (to == nullptr && sim::is_device(dst, nullptr)))
    return sim::kCopyException;  // past the end
  std::memcpy(to != nullptr ? to : dst, from != nullptr ? from : src, nbytes);
  return sim::kSuccess;
}

bool is_pageable(const void* address) {
  return !sim::is_device(address, nullptr) && !sim::is_host_known(address);
}

bool is_at(const aclrtMemLocation& location, const void* address) {
  int device = 0;
  if (!sim::is_device(address, &device))
    return location.type == ACL_MEM_LOCATION_TYPE_HOST;
  return location.type == ACL_MEM_LOCATION_TYPE_DEVICE && location.id == static_cast<uint32_t>(device);
}

int submit_copy(void* dst, const void* src, size_t nbytes, void* stream) {
  if (is_pageable(dst) || is_pageable(src)) {  // the driver waits and copies itself
    if (const int error = aclrtSynchronizeStream(stream))
      return error;
    return copy_blocking(dst, src, nbytes);
  }
  return sim::submit(stream, [=] {
    return copy_now(static_cast<char*>(dst), static_cast<const char*>(src), 0, 0, nbytes, 1);
  });
}

}  // namespace

SIM_API aclError aclInit(const char*) {
  return sim::kSuccess;
}
SIM_API aclError aclFinalize() {
  return sim::kSuccess;
}
SIM_API const char* aclGetRecentErrMsg() {
  return "simulated driver";
}
SIM_API const char* aclrtGetSocName() {
  const char* name = std::getenv("SIM_SOC_NAME");
  return name != nullptr ? name : "Ascend910_9391";
}
SIM_API aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  *major = 1, *minor = 17, *patch = 0;
  return sim::kSuccess;
}
SIM_API aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, "9.0.0");
  return sim::kSuccess;
}
SIM_API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = sim::kDevices;
  return sim::kSuccess;
}
SIM_API aclError aclrtResetDevice(int32_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return sim::kSuccess;
}
SIM_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = 1;
  return sim::kSuccess;
}
SIM_API aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  *flags = 0, *active = 1;
  return sim::kSuccess;
}
SIM_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  *logic = user;
  return sim::kSuccess;
}
SIM_API aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logic, int32_t* const physical) {
  *physical = logic;
  return sim::kSuccess;
}
SIM_API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  SIM_ENTER();
  if (attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM)
    *value = kVectorCores;
  else if (static_cast<int>(attribute) == 204)  // ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE
    *value = kBufferBytes;
  else
    return sim::kNotSupported;
  return sim::kSuccess;
}
SIM_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? kVectorCores : 24;
  return sim::kSuccess;
}
SIM_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
  return sim::kSuccess;
}
SIM_API aclError aclrtGetLastError(aclrtLastErrLevel) {
  return sim::kSuccess;
}

// torch_npu wants these to succeed and uses none of what they set.
SIM_API aclError aclSetCompileopt(aclCompileOpt, const char*) {
  return sim::kSuccess;
}
SIM_API size_t aclGetCompileoptSize(aclCompileOpt) {
  return 16;
}
SIM_API aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  std::memset(value, 0, length);
  return sim::kSuccess;
}
SIM_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) {
  return sim::kSuccess;
}
SIM_API aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return sim::kSuccess;
}
SIM_API aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  *actual = timeout;
  return sim::kSuccess;
}
SIM_API aclError aclrtSetOpWaitTimeout(uint32_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) {
  return sim::kSuccess;
}
SIM_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) {
  return sim::kSuccess;
}

SIM_API aclError aclrtMalloc(void** address, size_t nbytes, aclrtMemMallocPolicy) {
  SIM_ENTER();
  const int device = sim::current_device();
  if (sim::device_bytes_in_use(device) + nbytes > kMemoryBytes)
    return sim::kOutOfMemory;
  *address = sim::allocate_device(nbytes, device);
  return *address != nullptr ? sim::kSuccess : sim::kOutOfMemory;
}
SIM_API aclError aclrtMallocAlign32(void** address, size_t nbytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, nbytes, policy);
}
SIM_API aclError aclrtFree(void* address) {
  return sim::free_device(address) ? sim::kSuccess : sim::kInvalidParam;
}
SIM_API aclError aclrtMallocHost(void** address, size_t nbytes) {
  SIM_ENTER();
  *address = sim::allocate_pinned(nbytes);
  return *address != nullptr ? sim::kSuccess : sim::kOutOfMemory;
}
SIM_API aclError aclrtMallocHostWithCfg(void** address, uint64_t nbytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, nbytes);
}
SIM_API aclError aclrtFreeHost(void* address) {
  return sim::free_pinned(address) ? sim::kSuccess : sim::kInvalidParam;
}
SIM_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *total = kMemoryBytes;
  *free = kMemoryBytes - sim::device_bytes_in_use(sim::current_device());
  return sim::kSuccess;
}
SIM_API aclError aclrtHostRegister(void* host, uint64_t nbytes, aclrtHostRegisterType, void** device_address) {
  SIM_ENTER();
  *device_address = sim::register_host(host, nbytes);
  return *device_address != nullptr ? sim::kSuccess : sim::kOutOfMemory;
}
SIM_API aclError aclrtHostUnregister(void* host) {
  SIM_ENTER();
  return sim::unregister_host(host) ? sim::kSuccess : sim::kInvalidParam;
}
SIM_API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  int device = 0;
  *attributes = {};
  if (sim::is_device(address, &device))
    attributes->location = {static_cast<uint32_t>(device), ACL_MEM_LOCATION_TYPE_DEVICE};
  else if (sim::is_host_known(address))
    attributes->location = {0, ACL_MEM_LOCATION_TYPE_HOST};
  else
    attributes->location = {0, ACL_MEM_LOCATION_TYPE_UNREGISTERED};
  return sim::kSuccess;
}

SIM_API aclError aclrtMemcpy(void* dst, size_t max, const void* src, size_t nbytes, aclrtMemcpyKind) {
  SIM_ENTER();
  if (nbytes > max)
    return sim::kInvalidParam;
  sim::count_host_sync();
  return copy_blocking(dst, src, nbytes);
}
SIM_API aclError aclrtMemcpyAsync(void* dst, size_t max, const void* src, size_t nbytes, aclrtMemcpyKind,
                                  aclrtStream stream) {
  SIM_ENTER();
  return nbytes > max ? sim::kInvalidParam : submit_copy(dst, src, nbytes, stream);
}
SIM_API aclError aclrtMemcpy2dAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch,
                                    size_t width, size_t height, aclrtMemcpyKind, aclrtStream stream) {
  SIM_ENTER();
  if (width > dst_pitch || width > src_pitch || width > kMaxRectangleSide || height > kMaxRectangleSide ||
      is_pageable(dst) || is_pageable(src))
    return sim::kInvalidParam;
  return sim::submit(stream, [=] {
    return copy_now(static_cast<char*>(dst), static_cast<const char*>(src), dst_pitch, src_pitch, width,
                    height);
  });
}
SIM_API aclError aclrtMemcpyBatchAsync(void** dsts, size_t* maxima, void** srcs, size_t* sizes, size_t count,
                                       aclrtMemcpyBatchAttr* attributes, size_t* first_uses,
                                       size_t num_attributes, size_t* failed, aclrtStream stream) {
  SIM_ENTER();
  if (count == 0 || count > kMaxBatch || num_attributes != 1 || first_uses[0] != 0)
    return sim::kInvalidParam;
  if (!is_at(attributes->dstLoc, dsts[0]) || !is_at(attributes->srcLoc, srcs[0]))
    return sim::kInvalidParam;
  for (size_t i = 0; i < count; ++i)
    if (sizes[i] > maxima[i] || is_pageable(dsts[i]) || is_pageable(srcs[i])) {
      *failed = i;
      return sim::kInvalidParam;
    }
  for (size_t i = 0; i < count; ++i)
    (void)submit_copy(dsts[i], srcs[i], sizes[i], stream);
  return sim::kSuccess;
}
SIM_API aclError aclrtMemset(void* address, size_t max, int32_t value, size_t nbytes) {
  SIM_ENTER();
  char* bytes = sim::find(address, nbytes, sim::Reach::kCopy);
  if (nbytes > max || bytes == nullptr)
    return sim::kInvalidParam;
  sim::count_host_sync();
  std::memset(bytes, value, nbytes);
  return sim::kSuccess;
}
SIM_API aclError aclrtMemsetAsync(void* address, size_t max, int32_t value, size_t nbytes, aclrtStream stream) {
  SIM_ENTER();
  if (nbytes > max)
    return sim::kInvalidParam;
  return sim::submit(stream, [=] {
    char* bytes = sim::find(address, nbytes, sim::Reach::kCopy);
    if (bytes == nullptr)
      return sim::kCopyException;
    std::memset(bytes, value, nbytes);
    return sim::kSuccess;
  });
}
