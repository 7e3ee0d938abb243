#include "copy_kernel.h"

#include <algorithm>
#include <limits>

#include "runtime.h"
// After runtime.h, whose vectors it uses.
#include "../copy_rows.cuh"

namespace hicache {
namespace {

template <int kVectorBytes, typename Slot>
__global__ void __launch_bounds__(kCopyThreads, 1) copy_kernel(const __grid_constant__ CopyParams params) {
  copy_rows<kVectorBytes, Slot>(params);
}

template <typename Kernel>
void start(Kernel* kernel, unsigned blocks, const CopyParams& params, bool follows, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kCopyThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = follows ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "launching the copy kernel");
}

}  // namespace

void launch_copy(CopyParams& params, const Box& box, int vector_bytes, int64_t max_blocks, bool follows,
                 cudaStream_t stream) {
  fill_box(params, box, vector_bytes);
  constexpr int64_t kTileUnits = kCopyThreads * kUnitsPerThread;
  const int64_t tiles = (params.num_units + kTileUnits - 1) / kTileUnits;
  const auto blocks = static_cast<unsigned>(std::min(tiles, max_blocks));
  const bool is_narrow = std::max(params.dst_slots, params.src_slots) <= std::numeric_limits<int32_t>::max();
  const auto choose = [&](auto narrow, auto wide) {
    start(is_narrow ? narrow : wide, blocks, params, follows, stream);
  };
  switch (vector_bytes) {
    case 16:
      return choose(copy_kernel<16, int32_t>, copy_kernel<16, int64_t>);
    case 8:
      return choose(copy_kernel<8, int32_t>, copy_kernel<8, int64_t>);
    case 4:
      return choose(copy_kernel<4, int32_t>, copy_kernel<4, int64_t>);
    case 2:
      return choose(copy_kernel<2, int32_t>, copy_kernel<2, int64_t>);
    default:
      return choose(copy_kernel<1, int32_t>, copy_kernel<1, int64_t>);
  }
}

}  // namespace hicache
