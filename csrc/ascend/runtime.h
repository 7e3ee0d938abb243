// The Ascend runtime in the few words that this folder uses: checked calls, the current stream, capture.
//
// The driver's functions are declared here and found when they are first needed, in the library that
// torch_npu has loaded: the backend builds anywhere, without CANN, and one wheel serves every CANN.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstddef>
#include <cstdint>

#include "../text.h"

namespace hicache {

constexpr int kAclNotSupported = 207000;
constexpr int kAclApiNotSupported = 200001;
constexpr int kAclFeatureUnsupported = 200006;

// aclrtMemcpyKind
enum CopyKind : int { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice };

struct BatchAttribute {  // aclrtMemcpyBatchAttr
  uint32_t dst_id, dst_type, src_id, src_type;
  uint8_t reserved[16];
};
struct PointerAttributes {  // aclrtPtrAttributes
  uint32_t id, type, page_size, reserved[4];
};
constexpr uint32_t kEventSync = 1;  // ACL_EVENT_SYNC: between streams
constexpr uint32_t kLocationHost = 0, kLocationDevice = 1;

// Null where this CANN does not have the function; without the first block there is no driver.
struct Driver {
  int (*malloc_device)(void**, size_t, int);
  int (*malloc_host)(void**, size_t);
  int (*memset)(void*, size_t, int32_t, size_t);
  int (*memset_async)(void*, size_t, int32_t, size_t, void*);
  int (*memcpy)(void*, size_t, const void*, size_t, int);
  int (*memcpy_async)(void*, size_t, const void*, size_t, int, void*);
  int (*create_event)(void**, uint32_t);
  int (*record_event)(void*, void*);
  int (*wait_event)(void*, void*);  // stream, event
  int (*synchronize_stream)(void*);
  int (*synchronize_device)();
  const char* (*recent_error)();

  int (*memcpy_2d_async)(void*, size_t, const void*, size_t, size_t, size_t, int, void*);
  int (*memcpy_batch_async)(void**, size_t*, void**, size_t*, size_t, BatchAttribute*, size_t*, size_t, size_t*,
                            void*);
  int (*host_register)(void*, uint64_t, int, void**);
  int (*host_unregister)(void*);
  int (*pointer_attributes)(const void*, PointerAttributes*);
  int (*device_info)(uint32_t, int, int64_t*);
  int (*device_capability)(uint32_t, int, int64_t*);
  int (*capture_info)(void*, int*, void**);
  const char* (*soc_name)();
};

// Throws RuntimeError where libascendcl.so can't be loaded.
const Driver& driver();

inline bool is_not_supported(int status) {
  return status == kAclNotSupported || status == kAclApiNotSupported || status == kAclFeatureUnsupported;
}

// Throws RuntimeError with the driver's number and text for what went wrong.
void check_acl(int status, const char* what);

// torch_npu submits its own work from a thread; asking for the stream waits until that thread has submitted
// what is queued. So ask right before submitting, after the last call into torch.
void* current_stream(int32_t device_index);

bool is_capturing(void* stream);

}  // namespace hicache
