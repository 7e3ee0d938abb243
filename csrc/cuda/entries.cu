#include "entries.h"

#include <cub/device/device_radix_sort.cuh>

#include <algorithm>

#include "runtime.h"
#include "upload.h"
// After runtime.h and upload.h, whose words they use.
#include "../copy_rows.cuh"
#include "../device_entries.h"
#include "../page_indices.cuh"
#include "../page_indices.h"

namespace hicache {
namespace {

constexpr int kPrepareThreads = 256;

// A key whose low bits, however many are sorted by, put it behind every slot; the copy kernel reads it as -1.
constexpr uint32_t kPaddingKey = 0xFFFFFFFF;

// Checks each entry and writes it as a (key, value) pair: key is the slot to sort by, with padding last.
__global__ void prepare_entries(const __grid_constant__ CopyParams params, bool by_dst, uint32_t* keys,
                                int32_t* values) {
  const int64_t count = read_count(params);
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < params.num_entries; i += step) {
    const int64_t dst_slot = i < count ? read_dst_slot(params, i) : -1;
    const int64_t src_slot = i < count ? read_src_slot(params, i) : -1;
    bool is_bad;
    const bool moves = check_slots(params, dst_slot, src_slot, is_bad);
    if (is_bad)
      report_bad_entry(params, i);
    const int64_t host_slot = by_dst ? dst_slot : src_slot;
    keys[i] = moves ? static_cast<uint32_t>(host_slot) : kPaddingKey;
    values[i] = static_cast<int32_t>(moves ? (by_dst ? src_slot : dst_slot) : -1);
  }
  report_clamped_count(params);
}

__global__ void select_skipped_kernel(DeviceIndices device_slots, int64_t first_entry, int64_t num_device_slots,
                                      const int64_t* host_slots, int64_t size, int64_t* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size; i += step) {
    const int64_t slot = read_index(device_slots, first_entry + i);
    out[i] = slot < 0 || slot >= num_device_slots ? host_slots[i] : -1;
  }
}

__global__ void page_kernel(const PageParams params) {
  write_pages(params, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

unsigned prepare_blocks(int64_t n) {
  return static_cast<unsigned>(std::min<int64_t>((n + kPrepareThreads - 1) / kPrepareThreads, 1024));
}

int bits_of(int64_t value) {
  int bits = 1;
  while (value >> bits)
    ++bits;
  return bits;
}

}  // namespace

Tensor page_indices(const Tensor& tokens, int64_t page_size) {
  const torch::stable::accelerator::DeviceGuard guard(tokens.get_device_index());
  return page_indices_by(tokens, page_size, [&](const PageParams& params) {
    page_kernel<<<page_blocks(params.num_pages), kPageThreads, 0, current_stream(tokens.get_device_index())>>>(
        params);
    check_cuda(cudaGetLastError(), "launching the kernel that makes pages of tokens");
  });
}

void select_skipped(const DeviceIndices& device_slots, int64_t first_entry, int64_t num_device_slots,
                    const int64_t* host_slots, int64_t size, int64_t* out, cudaStream_t stream) {
  select_skipped_kernel<<<prepare_blocks(size), kPrepareThreads, 0, stream>>>(
      device_slots, first_entry, num_device_slots, host_slots, size, out);
  check_cuda(cudaGetLastError(), "launching the selection of skipped entries");
}

Entries device_entries(const TransferArgs& args, cudaStream_t stream) {
  return bring_entries(args, stream);
}

void sort_entries(Entries& entries, const TransferArgs& args, const ErrorSink& errors, bool by_dst,
                  cudaStream_t stream) {
  const int64_t n = entries.num_entries;
  const int end_bit = bits_of(by_dst ? args.dst_slots : args.src_slots);
  size_t sort_bytes = 0;
  cub::DoubleBuffer<uint32_t> no_keys;
  cub::DoubleBuffer<int32_t> no_values;
  check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, no_keys, no_values, n, 0, end_bit, stream),
             "sizing the sort of the indices");
  const int64_t array_bytes = (n * 4 + 255) / 256 * 256;
  const Tensor scratch = empty_bytes(4 * array_bytes + static_cast<int64_t>(sort_bytes), args.device);
  char* memory = static_cast<char*>(scratch.data_ptr());
  cub::DoubleBuffer<uint32_t> keys(reinterpret_cast<uint32_t*>(memory),
                                   reinterpret_cast<uint32_t*>(memory + array_bytes));
  cub::DoubleBuffer<int32_t> values(reinterpret_cast<int32_t*>(memory + 2 * array_bytes),
                                    reinterpret_cast<int32_t*>(memory + 3 * array_bytes));
  CopyParams params{};
  params.dst_indices = entries.dst;
  params.src_indices = entries.src;
  params.count = entries.count;
  params.num_entries = n;
  params.dst_slots = args.dst_slots;
  params.src_slots = args.src_slots;
  params.errors = errors;
  prepare_entries<<<prepare_blocks(n), kPrepareThreads, 0, stream>>>(params, by_dst, keys.Current(),
                                                                     values.Current());
  check_cuda(cudaGetLastError(), "launching the check of the indices");
  check_cuda(cub::DeviceRadixSort::SortPairs(memory + 4 * array_bytes, sort_bytes, keys, values, n, 0, end_bit,
                                             stream),
             "sorting the indices");
  const DeviceIndices host{keys.Current(), 1, 0}, other{values.Current(), 1, 0};
  entries.dst = by_dst ? host : other;
  entries.src = by_dst ? other : host;
  entries.count = {};
  entries.scratch.push_back(scratch);
}

}  // namespace hicache
