#include "upload.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace hicache {

struct Upload::Block {
  char* host = nullptr;
  char* device = nullptr;
  int64_t nbytes = 0;
  cudaEvent_t read = nullptr;  // recorded behind the kernel that read it last
  bool is_used = false;
};

namespace {

constexpr int64_t kMinBlockBytes = int64_t{1} << 16;
constexpr int kFetchThreads = 256;
constexpr int kMaxFetchBlocks = 16;  // 64 KiB in flight fill the link

// Blocks of all devices (memory is mapped for each), kept for the life of the process: as many as there were
// uploads in flight at once.
struct Blocks {
  std::mutex mutex;
  std::vector<Upload::Block*> all;
};

Blocks& blocks() {
  static auto* instance = new Blocks;
  return *instance;
}

bool is_read(const Upload::Block& block) {
  const cudaError_t status = cudaEventQuery(block.read);
  if (status == cudaErrorNotReady)
    (void)cudaGetLastError();
  return status == cudaSuccess;
}

// Events belong to a device; one of another device can be asked, but not recorded on this one's streams.
Upload::Block* new_block(int64_t nbytes) {
  auto block = std::make_unique<Upload::Block>();
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, nbytes, cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc for indices");
  void* device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&device, memory, 0), "cudaHostGetDevicePointer");
  block->host = static_cast<char*>(memory);
  block->device = static_cast<char*>(device);
  block->nbytes = nbytes;
  return block.release();
}

Upload::Block* take_block(int64_t nbytes) {
  int64_t rounded = kMinBlockBytes;
  while (rounded < nbytes)
    rounded *= 2;
  const RelaxedCapture relaxed;
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  for (Upload::Block* block : blocks().all)
    if (!block->is_used && block->nbytes == rounded && (block->read == nullptr || is_read(*block))) {
      block->is_used = true;
      return block;
    }
  Upload::Block* block = new_block(rounded);
  block->is_used = true;
  blocks().all.push_back(block);
  return block;
}

__global__ void fetch(const int4* from, int4* to, int64_t vectors) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < vectors; i += step)
    to[i] = from[i];
}

}  // namespace

Upload::Upload(int64_t nbytes) : nbytes_(nbytes), block_(take_block(std::max<int64_t>(nbytes, 1))) {}

Upload::~Upload() {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  block_->is_used = false;
}

char* Upload::data() const {
  return block_->host;
}

Tensor Upload::to_device(const Device& device, cudaStream_t stream) {
  const int64_t vectors = (nbytes_ + 15) / 16;
  Tensor on_device = empty_bytes(std::max<int64_t>(vectors, 1) * 16, device);
  if (block_->read != nullptr)
    (void)cudaEventDestroy(block_->read);  // of the last user's device, perhaps another one
  block_->read = nullptr;
  check_cuda(cudaEventCreateWithFlags(&block_->read, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const auto grid = static_cast<unsigned>(
      std::clamp<int64_t>((vectors + kFetchThreads - 1) / kFetchThreads, 1, kMaxFetchBlocks));
  fetch<<<grid, kFetchThreads, 0, stream>>>(reinterpret_cast<const int4*>(block_->device),
                                            static_cast<int4*>(on_device.data_ptr()), vectors);
  check_cuda(cudaGetLastError(), "launching the upload of indices");
  check_cuda(cudaEventRecord(block_->read, stream), "cudaEventRecord");
  return on_device;
}

Tensor empty_bytes(int64_t nbytes, const Device& device) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &nbytes, &stride, aoti_torch_dtype_uint8(), device.type,
                                                  device.index, &handle));
  return Tensor(handle);
}

}  // namespace hicache
