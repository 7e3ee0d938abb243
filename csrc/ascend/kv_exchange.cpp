#include "kv_exchange.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "chip.h"
#include "error_records.h"
#include "kv_exchange_params.h"
#include "runtime.h"

namespace hicache {
namespace {

// AI-vector cores that a call occupies unless max_blocks says otherwise. Not measured: chosen so that most of
// an Atlas A2's 40 or more stay with the model.
constexpr int64_t kDefaultBlocks = 8;
// Of the unified buffer, for the error lines and what the compiler itself puts there.
constexpr int64_t kReservedBytes = 8192;
constexpr int64_t kBufferGranule = 32;

using Launch = uint32_t (*)(uint32_t blocks, void* stream, void* params);

struct Kernel {
  Launch launch = nullptr;
  std::string missing;
};

// The kernel is built by CANN into a library of its own, beside this one or where HICACHE_ASCEND_KERNEL says.
Kernel load_kernel() {
  Kernel kernel;
  std::string path;
  if (const char* given = std::getenv("HICACHE_ASCEND_KERNEL")) {
    path = given;
  } else {
    Dl_info here{};
    if (dladdr(reinterpret_cast<void*>(&missing_kernel), &here) != 0)
      path = here.dli_fname;
    path = path.substr(0, path.rfind('/') + 1) + "_ascend_kernel.so";
  }
  void* library = dlopen(path.c_str(), RTLD_NOW);
  if (library != nullptr)
    kernel.launch = reinterpret_cast<Launch>(dlsym(library, "aclrtlaunch_hicache_kv_exchange"));
  if (kernel.launch == nullptr)
    kernel.missing =
        concat("the AI-vector kernel is not there: ", dlerror(),
               ". Build it with CANN as docs/ascend.md says, or use method 'copy_engine' with both "
               "index tensors on the CPU");
  return kernel;
}

const Kernel& kernel() {
  static const Kernel loaded = load_kernel();
  return loaded;
}

Tensor empty_int64(int64_t elements, const Device& device) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &elements, &stride, aoti_torch_dtype_int64(), device.type,
                                                  device.index, &handle));
  return Tensor(handle);
}

// Pinned memory of torch's own allocator, which reuses it only when an event says that the copy out of it ran.
Tensor empty_pinned_int64(int64_t elements) {
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided_pinned(1, &elements, &stride, aoti_torch_dtype_int64(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

int64_t address_of(const void* data) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
}

// The words of one launch: the header, the groups, and behind them indices that were on the CPU.
class Params {
 public:
  explicit Params(const TransferArgs& args) : args_(args) {
    words_.resize(static_cast<size_t>(kHeaderWords) + args.groups.size() * kGroupWords);
    for (size_t i = 0; i < args.groups.size(); ++i)
      add_group(args.groups[i], kHeaderWords + i * kGroupWords);
  }

  std::vector<int64_t>& words() {
    return words_;
  }

  // Indices as they are on the device. Their addresses are set when the upload's own is known.
  void set_indices(const IndexView& view, HeaderWord first) {
    words_[first] = address_of(view.data);
    words_[first + 1] = view.stride;
    words_[first + 2] = view.is_int64;
  }

  // Appends one index tensor of the CPU, as int64; gives the word where it begins.
  size_t add_indices(const IndexView& view, bool is_dst) {
    const size_t at = words_.size();
    words_.resize(at + static_cast<size_t>(args_.num_entries));
    for (int64_t i = 0; i < args_.num_entries; ++i)
      words_[at + i] = is_dst && args_.is_overwritten(i) ? -1 : view[i];
    return at;
  }

 private:
  void add_group(const PlaneGroup& group, size_t at) {
    words_[at + kChunkBytes] = group.chunk_bytes;
    words_[at + kDstSlotStride] = group.dst_slot_stride_bytes;
    words_[at + kSrcSlotStride] = group.src_slot_stride_bytes;
    words_[at + kNumLoops] = static_cast<int64_t>(group.loops.size());
    words_[at + kLoopsAt] = static_cast<int64_t>(words_.size());
    for (const Loop& loop : group.loops)
      words_.insert(words_.end(), {loop.size, loop.dst_stride_bytes, loop.src_stride_bytes});
    words_[at + kNumPlanes] = static_cast<int64_t>(group.planes.size());
    words_[at + kPlanesAt] = static_cast<int64_t>(words_.size());
    for (const PlaneAddress& plane : group.planes)
      words_.insert(words_.end(), {address_of(plane.dst), address_of(plane.src)});
  }

  const TransferArgs& args_;
  std::vector<int64_t> words_;
};

int64_t buffer_bytes(const Chip& chip) {
  return (chip.buffer_bytes - kReservedBytes) / 2 / kBufferGranule * kBufferGranule;
}

uint32_t num_blocks(const TransferArgs& args, const Chip& chip, int64_t buffer) {
  int64_t items = 0;
  for (const PlaneGroup& group : args.groups)
    items += group.chunks_per_plane() * static_cast<int64_t>(group.planes.size()) *
             ((group.chunk_bytes + buffer - 1) / buffer) * args.num_entries;
  const int64_t limit = args.max_blocks > 0 ? args.max_blocks : kDefaultBlocks;
  return static_cast<uint32_t>(std::max<int64_t>(1, std::min({limit, chip.vector_cores, items})));
}

// The upload of a captured launch runs again with each replay, so what it reads stays for good: a few words.
void keep_for_replays(const Tensor& pinned) {
  static auto* kept = new std::vector<Tensor>;
  kept->push_back(pinned);
}

}  // namespace

const std::string& missing_kernel() {
  return kernel().missing;
}

void exchange_rows(const TransferArgs& args) {
  const int32_t device_index = args.device.index;
  const Chip& chip = chip_of(device_index);
  const ErrorSink sink = next_error_sink(device_index, current_stream(device_index));
  const bool may_report = !args.has_cpu_indices();
  Params params(args);
  std::vector<int64_t>& words = params.words();
  params.set_indices(args.dst_indices, kDstIndices);
  params.set_indices(args.src_indices, kSrcIndices);
  const size_t dst_at = args.dst_indices.is_cpu ? params.add_indices(args.dst_indices, true) : 0;
  const size_t src_at = args.src_indices.is_cpu ? params.add_indices(args.src_indices, false) : 0;
  words[kCount] = address_of(args.count.data);
  words[kCountIsInt64] = args.count.is_int64;
  words[kNumEntries] = args.num_entries;
  words[kDstSlots] = args.dst_slots;
  words[kSrcSlots] = args.src_slots;
  words[kErrorRecord] = may_report ? sink.device_address : 0;
  words[kErrorCores] = sink.cores;
  words[kCall] = sink.call;
  words[kBufferBytes] = buffer_bytes(chip);
  words[kNumGroups] = static_cast<int64_t>(args.groups.size());

  const auto size = static_cast<int64_t>(words.size());
  const Tensor on_device = empty_int64(size, args.device);
  const int64_t base = address_of(on_device.data_ptr());
  for (const auto& [at, first] : {std::pair(dst_at, kDstIndices), std::pair(src_at, kSrcIndices)})
    if (at != 0) {
      words[first] = base + static_cast<int64_t>(at * sizeof(int64_t));
      words[first + 1] = 1;
      words[first + 2] = 1;
    }
  const Tensor pinned = empty_pinned_int64(size);
  std::memcpy(pinned.data_ptr(), words.data(), words.size() * sizeof(int64_t));
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(on_device.get(), pinned.get(), /*non_blocking=*/1));

  void* stream = current_stream(device_index);  // behind the upload, which torch_npu may still hold back
  if (is_capturing(stream))
    keep_for_replays(pinned);
  const uint32_t status =
      kernel().launch(num_blocks(args, chip, words[kBufferBytes]), stream, on_device.data_ptr());
  check_acl(static_cast<int>(status), "launching the copy kernel");
  if (may_report)
    fetch_errors(sink, stream);
}

}  // namespace hicache
