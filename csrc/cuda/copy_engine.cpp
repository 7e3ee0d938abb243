#include "copy_engine.h"

#include <dlfcn.h>

#include "runtime.h"
#include "../streams.h"
// After runtime.h and copy_engine.h, whose words it uses.
#include "../copy_queue.h"

namespace hicache {
namespace {

// cuMemcpyBatchAsync as CUDA 12.8 introduced it. It is asked from the driver by that version, so its signature
// is known whatever toolkit built this file; drivers without it answer with nothing.
struct BatchAttributes {
  int src_access_order;
  int src_location_type, src_location_id;
  int dst_location_type, dst_location_id;
  unsigned flags;
};
constexpr int kStreamAccessOrder = 1;  // sources are read in stream order, not when the call is made
using MemcpyBatch = int (*)(uintptr_t* dsts, uintptr_t* srcs, size_t* sizes, size_t count,
                            BatchAttributes* attributes, size_t* attribute_begins, size_t num_attributes,
                            size_t* failed, cudaStream_t stream);
using GetProcAddress = int (*)(const char* symbol, void** function, int version, uint64_t flags, int* status);

MemcpyBatch find_memcpy_batch() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr)
    return nullptr;
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(driver, "cuGetProcAddress_v2"));
  void* function = nullptr;
  int status = 0;
  if (get == nullptr || get("cuMemcpyBatchAsync", &function, 12080, 0, &status) != 0)
    return nullptr;
  return reinterpret_cast<MemcpyBatch>(function);
}

MemcpyBatch memcpy_batch() {
  static const MemcpyBatch function = find_memcpy_batch();
  return function;
}

bool is_legacy(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy;
}

}  // namespace

void submit_copies(std::vector<void*>& dst, std::vector<const void*>& src, std::vector<size_t>& sizes,
                   cudaStream_t stream) {
  size_t done = 0;
  if (dst.size() > 1 && memcpy_batch() != nullptr) {
    BatchAttributes attributes{kStreamAccessOrder, 0, 0, 0, 0, 0};
    size_t first = 0, failed = 0;
    const int status = memcpy_batch()(reinterpret_cast<uintptr_t*>(dst.data()),
                                      reinterpret_cast<uintptr_t*>(const_cast<void**>(src.data())),
                                      sizes.data(), dst.size(), &attributes, &first, 1, &failed, stream);
    if (status == 0)
      done = dst.size();
    else
      (void)cudaGetLastError();  // not for this driver or memory: one by one, and again what it may have taken
  }
  for (size_t i = done; i < dst.size(); ++i)
    copy_async(dst[i], src[i], sizes[i], stream);
}

void transfer_by_copy_engine(const TransferArgs& args, bool is_store, const HostMemoryMap& map,
                             cudaStream_t stream) {
  if (!is_legacy(stream))
    return queue_copies(args, is_store, map, stream);
  Fork fork(stream, copy_stream(args.device.index, is_store));
  queue_copies(args, is_store, map, fork.stream());
  fork.join();
}

}  // namespace hicache
