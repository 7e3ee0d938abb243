#include "known_calls.h"

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>

#include "page_indices.h"

namespace hicache {
namespace {

using Description = std::vector<int64_t>;

struct KnownCall {
  std::vector<Tensor> dst_planes;
  std::vector<Tensor> src_planes;
  int64_t slot_dim;
  int64_t page_size;  // in tokens, where indices are tokens and slots are pages; 0 where both are the same
};

constexpr size_t kMostKept = 4096;        // a pool of 128 layers needs a few hundred
constexpr size_t kMostPlanes = 1u << 15;  // and a thousand planes; one of Python's takes 2.3 KB (2026-11-30)

class KnownCalls {
 public:
  std::shared_ptr<const KnownCall> find(const Description& description) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = calls_.find(description);
    return known == calls_.end() ? nullptr : known->second;
  }
  void keep(const Description& description, KnownCall call) {
    // What is forgotten is freed once the lock is: the planes' deleters call Python.
    auto kept = std::make_shared<const KnownCall>(std::move(call));
    std::map<Description, std::shared_ptr<const KnownCall>> forgotten;
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t planes = kept->dst_planes.size() + kept->src_planes.size();
    if (calls_.size() >= kMostKept || num_planes_ + planes > kMostPlanes) {
      forgotten.swap(calls_);
      num_planes_ = 0;
    }
    kept.swap(calls_[description]);
    num_planes_ += planes;
    if (kept != nullptr)
      num_planes_ -= kept->dst_planes.size() + kept->src_planes.size();
  }
  // Around a fork, so that the child never finds the lock held by a thread that it does not have.
  void lock() {
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  size_t num_planes_ = 0;
  std::map<Description, std::shared_ptr<const KnownCall>> calls_;
};

KnownCalls& known_calls = *new KnownCalls;  // never destroyed: the planes' deleters need the interpreter

const int has_fork_handlers =
    pthread_atfork([] { known_calls.lock(); }, [] { known_calls.unlock(); }, [] { known_calls.unlock(); });

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// A tensor that shares its memory until it is written to (torch._lazy_clone) gets its own here if the call
// `writes`, and another address with it.
void describe(const std::vector<Tensor>& tensors, bool writes, Description& description) {
  description.push_back(static_cast<int64_t>(tensors.size()));
  for (const Tensor& tensor : tensors) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    const void* data = writes ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
    // The number of the device, -1 for the CPU: no two kinds of accelerators give the same address.
    for (const int64_t part :
         {static_cast<int64_t>(reinterpret_cast<intptr_t>(data)), int64_t{tensor.get_device_index()},
          int64_t{dtype_of(tensor)}, static_cast<int64_t>(sizes.size())})
      description.push_back(part);
    description.insert(description.end(), sizes.begin(), sizes.end());
    description.insert(description.end(), strides.begin(), strides.end());
  }
}

// One index for `page_size` tokens, -1 for a page of -1.
template <typename Index>
bool fill_pages(const void* data, int64_t stride, int64_t page_size, int64_t* pages, int64_t num_pages) {
  const auto* tokens = static_cast<const Index*>(data);
  for (int64_t i = 0; i < num_pages; ++i) {
    const int64_t first = *tokens;
    const bool is_padding = first == -1;
    if (!is_padding && (first < 0 || first % page_size))
      return false;
    for (int64_t k = 0; k < page_size; ++k, tokens += stride)
      if (is_padding ? *tokens != -1 : *tokens < first || *tokens - first != k)
        return false;
    pages[i] = is_padding ? -1 : first / page_size;
  }
  return true;
}

// Nothing where Python must say what is wrong, or make the pages itself.
std::optional<Tensor> pages_of(const Tensor& tokens, int64_t page_size, PagesOf* device_pages) {
  if (!are_pages(tokens, page_size))
    return std::nullopt;
  if (!tokens.is_cpu())
    return device_pages ? std::optional(device_pages(tokens, page_size)) : std::nullopt;
  Tensor pages = empty_pages(tokens, page_size);
  auto* values = static_cast<int64_t*>(pages.mutable_data_ptr());
  const auto fill = [&](auto index) {
    return fill_pages<decltype(index)>(tokens.const_data_ptr(), tokens.stride(0), page_size, values,
                                       pages.numel());
  };
  const bool are_whole = dtype_of(tokens) == aoti_torch_dtype_int64() ? fill(int64_t{}) : fill(int32_t{});
  return are_whole ? std::optional(std::move(pages)) : std::nullopt;
}

}  // namespace

void keep_call(const std::vector<Tensor>& dst, const std::vector<Tensor>& src, const Tensor&, const Tensor&,
               int64_t form, const std::vector<Tensor>& dst_planes, const std::vector<Tensor>& src_planes,
               int64_t slot_dim, int64_t page_size) {
  Description description{form};
  describe(dst, true, description);
  describe(src, false, description);
  known_calls.keep(description, {dst_planes, src_planes, slot_dim, page_size});
}

bool run_known_call(Transfer* transfer, PagesOf* device_pages, const std::vector<Tensor>& dst,
                    const std::vector<Tensor>& src, const Tensor& dst_indices, const Tensor& src_indices,
                    int64_t form, int64_t max_blocks) {
  thread_local Description description;  // its memory serves all calls
  description.assign(1, form);
  describe(dst, true, description);
  describe(src, false, description);
  const std::shared_ptr<const KnownCall> call = known_calls.find(description);
  if (call == nullptr)
    return false;
  const auto run = [&](const Tensor& dst_slots, const Tensor& src_slots) {
    transfer(call->dst_planes, call->src_planes, dst_slots, src_slots, call->slot_dim, std::nullopt, "auto",
             max_blocks);
    return true;
  };
  if (call->page_size == 0)
    return run(dst_indices, src_indices);
  const std::optional<Tensor> dst_pages = pages_of(dst_indices, call->page_size, device_pages);
  const std::optional<Tensor> src_pages = pages_of(src_indices, call->page_size, device_pages);
  return dst_pages && src_pages && run(*dst_pages, *src_pages);
}

}  // namespace hicache
