// transfer_kv on Ascend NPUs: which method serves a call, and the backend's registrations.
#include "../transfer_kv.h"

#include <stdexcept>

#include "../known_calls.h"
#include "../plan.h"
#include "../text.h"
#include "backend.h"
#include "copy_engine.h"
#include "error_records.h"
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

struct Choice {
  Method method;
  std::string reason;
};

// `kernel` where the AI cores reach both pools, else `copy_engine`; what can't be served says why.
Choice choose(const TransferArgs& args, bool capturing) {
  if (capturing && (args.dst_indices.is_cpu || args.src_indices.is_cpu))
    refuse("indices on the CPU can't be captured, their values would be baked into the graph; put them on ",
           device_name(args.device));
  const char* index = args.dst_indices.is_cpu ? "src_indices" : "dst_indices";
  switch (args.method) {
    case Method::kStaged:
      refuse("method 'staged' is not built yet; use 'auto', 'kernel' or 'copy_engine'");
    case Method::kCopyEngine:
      if (!args.has_cpu_indices())
        refuse("method 'copy_engine' needs both index tensors on the CPU, but ", index, " is on ",
               device_name(args.device), "; use 'auto' or 'kernel'");
      return {Method::kCopyEngine, "asked for"};
    case Method::kKernel:
      break;
    case Method::kAuto:
      if (args.has_cpu_indices() && !args.unreachable.empty())
        return {Method::kCopyEngine, concat(args.unreachable, " has no address for an AI core")};
      if (args.has_cpu_indices() && !missing_kernel().empty())
        return {Method::kCopyEngine, "the AI-vector kernel is not built (docs/ascend.md)"};
      break;
  }
  if (!args.unreachable.empty())
    refuse(unreachable_text(args));
  if (!missing_kernel().empty())
    refuse(missing_kernel());
  return {Method::kKernel, args.method == Method::kKernel ? "asked for" : "the AI cores reach both pools"};
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
  const Method method_of_call = choose(args, capturing).method;
  if (args.is_empty())
    return;
  if (method_of_call == Method::kKernel)
    return exchange_rows(args);
  if (map.has_translated)  // copies take the host's own addresses
    args = plan(nullptr);
  copy_by_engine(args);
}

std::string explain_ascend(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                           const Tensor& dst_indices, const Tensor& src_indices, int64_t slot_dim,
                           const std::optional<Tensor>& count, const std::string& method, int64_t max_blocks) {
  const AscendHostMemoryMap map;
  const auto plan_with = [&](const HostMemoryMap* reached) {
    return plan_transfer(dst, src, dst_indices, src_indices, slot_dim, count, method, max_blocks, reached);
  };
  TransferArgs args = plan_with(&map);
  const torch::stable::accelerator::DeviceGuard guard(args.device.index);
  const Choice chosen = choose(args, is_capturing(current_stream(args.device.index)));
  Plan plan;
  plan.method = chosen.method;
  plan.reason = chosen.reason;
  plan.bytes = moved_bytes(args);
  if (args.is_empty())
    return plan_text(plan);
  if (chosen.method == Method::kKernel) {
    plan.batches = 1;
    return plan_text(plan);
  }
  if (map.has_translated)
    args = plan_with(nullptr);
  const CopyCounts counts = count_copies(args);
  plan.runs = static_cast<int64_t>(slot_runs(args).size());
  plan.rows = counts.rows;
  plan.batches = counts.submissions;
  return plan_text(plan);
}

void set_method_table_ascend(const Tensor& on_device, const std::vector<int64_t>&) {
  throw std::invalid_argument(
      concat("[method_table] there is no table on npu:", on_device.get_device_index(),
             ": 'auto' takes the kernel where the AI cores reach both pools, else the copy engine."));
}

}  // namespace
}  // namespace hicache

// All of the backend. torch_hicache/_backends.py loads the library only where torch_npu owns the key.
STABLE_TORCH_LIBRARY_IMPL(hicache, PrivateUse1, m) {
  m.impl("transfer_kv", TORCH_BOX(&hicache::transfer_kv_ascend));
  m.impl("transfer_known", TORCH_BOX(&hicache::transfer_known<hicache::transfer_kv_ascend>));
  m.impl("keep_call", TORCH_BOX(&hicache::keep_call));
  m.impl("explain", TORCH_BOX(&hicache::explain_ascend));
  m.impl("set_method_table", TORCH_BOX(&hicache::set_method_table_ascend));
  m.impl("check_errors", TORCH_BOX(&hicache::check_errors_ascend));
  m.impl("new_error_record", TORCH_BOX(&hicache::new_error_record));
  m.impl("use_error_record", TORCH_BOX(&hicache::use_error_record));
  m.impl("check_error_record", TORCH_BOX(&hicache::check_error_record));
  m.impl("free_error_record", TORCH_BOX(&hicache::free_error_record));
  m.impl("register_host_memory", TORCH_BOX(&hicache::register_host_memory));
  m.impl("map_host_memory", TORCH_BOX(&hicache::map_host_memory));
  m.impl("unregister_host_memory", TORCH_BOX(&hicache::unregister_host_memory));
  m.impl("host_device_address", TORCH_BOX(&hicache::host_device_address));
}
