// transfer_kv on Ascend NPUs: which method serves a call, and the backend's registrations.
#include "../transfer_kv.h"

#include <stdexcept>

#include "../text.h"
#include "backend.h"
#include "copy_engine.h"
#include "device_state.h"
#include "host_memory.h"
#include "kv_exchange.h"
#include "runtime.h"

namespace hicache {
namespace {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(concat("[transfer_kv] ", parts..., "."));
}

std::string unreachable_text(const TransferArgs& args) {
  return concat(args.unreachable,
                " is pageable or only page-locked host memory, which an AI core can't reach; "
                "allocate it with torch_hicache.empty_host(shape, dtype, '",
                device_name(args.device), "'), or use method 'copy_engine' with both index tensors on the CPU");
}

// `kernel` where the AI cores reach both pools, else `copy_engine`; what can't be served says why.
Method choose_method(const TransferArgs& args) {
  const char* index = args.dst_indices.is_cpu ? "src_indices" : "dst_indices";
  switch (args.method) {
    case Method::kStaged:
      refuse("method 'staged' is not built yet; use 'auto', 'kernel' or 'copy_engine'");
    case Method::kCopyEngine:
      if (!args.has_cpu_indices())
        refuse("method 'copy_engine' needs both index tensors on the CPU, but ", index, " is on ",
               device_name(args.device), "; use 'auto' or 'kernel'");
      return Method::kCopyEngine;
    case Method::kKernel:
      break;
    case Method::kAuto:
      if (args.has_cpu_indices() && (!args.unreachable.empty() || !missing_kernel().empty()))
        return Method::kCopyEngine;
      break;
  }
  if (!args.unreachable.empty())
    refuse(unreachable_text(args));
  if (!missing_kernel().empty())
    refuse(missing_kernel());
  return Method::kKernel;
}

void transfer_kv_ascend(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                        const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                        const std::optional<Tensor>& count, const std::string& method, int64_t max_blocks) {
  const AscendHostMemoryMap map;
  const auto plan = [&](const HostMemoryMap* reached) {
    return plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, reached);
  };
  TransferArgs args = plan(&map);
  const torch::stable::accelerator::DeviceGuard guard(args.device.index);
  void* stream = current_stream(args.device.index);
  const bool capturing = is_capturing(stream);
  if (!capturing)
    throw_recorded_error(args.device.index, stream, /*is_later_call=*/true);
  if (capturing && (args.dst_indices.is_cpu || args.src_indices.is_cpu))
    refuse("indices on the CPU can't be captured, their values would be baked into the graph; put them on ",
           device_name(args.device));
  const Method chosen = choose_method(args);
  if (args.is_empty())
    return;
  if (chosen == Method::kKernel)
    return exchange_rows(args);
  if (map.has_translated)  // copies take the host's own addresses
    args = plan(nullptr);
  copy_by_engine(args);
}

}  // namespace
}  // namespace hicache

// All of the backend. torch_hicache/_backends.py loads the library only where torch_npu owns the key.
STABLE_TORCH_LIBRARY_IMPL(hicache, PrivateUse1, m) {
  m.impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_ascend));
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors_ascend));
  m.impl("register_host_memory", TORCH_BOX(&hicache::register_host_memory));
  m.impl("map_host_memory", TORCH_BOX(&hicache::map_host_memory));
  m.impl("unregister_host_memory", TORCH_BOX(&hicache::unregister_host_memory));
  m.impl("host_device_address", TORCH_BOX(&hicache::host_device_address));
}
