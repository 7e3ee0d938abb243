#include "plan.h"

#include <algorithm>
#include <stdexcept>

#include "copy_blocks.h"
#include "text.h"

namespace hicache {
namespace {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(concat("[transfer_kv] ", parts...));
}

int64_t sum_rows(const TransferArgs& args, const std::vector<SlotRun>& runs, bool is_dst_host,
                 bool is_host_only) {
  int64_t rows = 0;
  for (const PlaneGroup& group : args.groups) {
    Box box = box_of(group, args.num_entries, is_dst_host);
    if (is_host_only)
      box = compact_box(box, !is_dst_host);
    rows += count_rows(box, runs);
  }
  return rows;
}

int64_t count_launches(const TransferArgs& args, bool is_dst_host) {
  int64_t launches = 0;
  for (const PlaneGroup& group : args.groups)
    for_each_launch(box_of(group, args.num_entries, is_dst_host), [&](const Box&, int) { ++launches; });
  return launches;
}

}  // namespace

Direction direction_of(const TransferArgs& args, bool (*is_host_memory)(const void*)) {
  // A tensor on the CPU is host memory; one of two on the device may be a view of it.
  const bool asks = !args.dst_device.is_cpu() && !args.src_device.is_cpu() && !args.dst_extents.empty();
  const bool is_dst_host = asks ? is_host_memory(args.dst_extents[0].begin) : args.dst_device.is_cpu();
  const bool is_src_host = asks ? is_host_memory(args.src_extents[0].begin) : args.src_device.is_cpu();
  return is_dst_host ? Direction::kStore : is_src_host ? Direction::kLoad : Direction::kOnDevice;
}

int64_t moved_bytes(const TransferArgs& args) {
  int64_t entries = args.num_entries;
  if (args.has_cpu_indices() && !args.is_empty()) {
    entries = 0;
    for_each_entry(args, 0, args.num_entries, [&](int64_t, int64_t) { ++entries; });
  }
  return entries * args.bytes_per_entry();
}

namespace {

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// What the checks of each method share: the facts of one call.
struct Call {
  const TransferArgs& args;
  Direction direction;
  bool capturing;
  const MethodTable& table;
  bool explains;

  bool is_dst_host() const {
    return direction == Direction::kStore;
  }
  bool has_host_indices() const {
    return is_dst_host() ? args.dst_indices.is_cpu : args.src_indices.is_cpu;
  }
  int64_t bytes() const {
    return args.num_entries * args.bytes_per_entry();
  }
  const char* host_indices_name() const {
    return is_dst_host() ? "dst_indices" : "src_indices";
  }
};

std::string no_kernel(const Call& call) {
  if (call.args.unreachable.empty())
    return "";
  return concat(call.args.unreachable,
                " is pageable host memory, which a kernel can't reach; allocate it with "
                "torch_hicache.empty_host(shape, dtype, '",
                device_name(call.args.device), "')");
}

std::string no_copy_engine(const Call& call) {
  if (call.args.has_cpu_indices())
    return "";
  const char* name = call.args.dst_indices.is_cpu ? "src_indices" : "dst_indices";
  return concat("method 'copy_engine' needs both index tensors on the CPU, but ", name, " is on ",
                device_name(call.args.device));
}

std::string no_staged(const Call& call) {
  if (call.direction == Direction::kOnDevice)
    return "method 'staged' moves between host and device memory, but both pools are on the device";
  if (call.has_host_indices())
    return "";
  return concat("method 'staged' needs the indices of the host pool on the CPU, but ", call.host_indices_name(),
                " is on ", device_name(call.args.device));
}

template <typename... Parts>
Plan kernel_plan(const Call& call, const Parts&... reason) {
  Plan plan;
  if (call.explains)
    plan = {Method::kKernel,
            0,
            0,
            call.args.is_empty() ? 0 : count_launches(call.args, call.is_dst_host()),
            moved_bytes(call.args),
            concat(reason...)};
  return plan;
}

Plan copy_engine_plan(const Call& call, std::string reason) {
  if (call.args.method == Method::kCopyEngine && !call.explains)
    return {Method::kCopyEngine, 0, 0, 0, 0, ""};
  const std::vector<SlotRun> runs = slot_runs(call.args);
  const int64_t rows = sum_rows(call.args, runs, call.is_dst_host(), /*is_host_only=*/false);
  return {Method::kCopyEngine,
          static_cast<int64_t>(runs.size()),
          rows,
          ceil_divide(rows, kMaxBatchCopies),
          slots_of(runs) * call.args.bytes_per_entry(),
          std::move(reason)};
}

std::vector<SlotRun> merged_host_runs(const TransferArgs& args, bool is_dst_host) {
  std::vector<SlotRun> merged;
  const std::vector<HostRun> runs = host_runs(args, is_dst_host, [](int64_t) { return true; });
  for (const HostRun& run : sorted_part(runs, 0, args.num_entries))
    if (!merged.empty() && run.host_slot == merged.back().dst_slot + merged.back().length)
      merged.back().length += run.length;
    else
      merged.push_back({run.host_slot, run.host_slot, run.length});
  return merged;
}

Plan staged_plan(const Call& call, std::string reason) {
  if (call.args.method == Method::kStaged && !call.explains)
    return {Method::kStaged, 0, 0, 0, 0, ""};
  const std::vector<SlotRun> runs = merged_host_runs(call.args, call.is_dst_host());
  const int64_t rows = sum_rows(call.args, runs, call.is_dst_host(), /*is_host_only=*/true);
  const int64_t bytes = slots_of(runs) * call.args.bytes_per_entry();
  return {Method::kStaged,
          static_cast<int64_t>(runs.size()),
          rows,
          ceil_divide(bytes, call.table.staging_bytes),
          bytes,
          std::move(reason)};
}

Plan choose_for_pageable(const Call& call) {
  if (no_copy_engine(call).empty())
    return copy_engine_plan(call, "the host pool is pageable; the call may block the host");
  if (no_staged(call).empty())
    return staged_plan(call, "the host pool is pageable; the call may block the host");
  refuse(no_kernel(call), ".");
}

std::string row_text(const Plan& plan) {
  return concat("rows of ", plan.bytes / std::max<int64_t>(plan.rows, 1), " bytes");
}

Plan choose_freely(const Call& call) {
  if (!no_kernel(call).empty())
    return choose_for_pageable(call);
  if (call.capturing)
    return kernel_plan(call, "only a kernel can be captured");
  if (call.direction == Direction::kOnDevice)
    return kernel_plan(call, "both pools are in device memory");
  if (call.bytes() < call.table.min_bytes)
    return kernel_plan(call, "small: ", call.bytes(), " bytes");
  if (!call.has_host_indices())
    return kernel_plan(call, call.host_indices_name(), " is on the device");
  const int64_t way = call.is_dst_host() ? 1 : 0;
  if (call.args.has_cpu_indices()) {
    Plan plan = copy_engine_plan(call, "");
    if (plan.bytes >= plan.rows * call.table.copy_engine_min_row_bytes[way]) {
      plan.reason =
          concat(row_text(plan), " on both sides: the copy engine's, beside which the model runs freely");
      return plan;
    }
  }
  Plan plan = staged_plan(call, "");
  if (plan.bytes >= plan.rows * call.table.staged_min_row_bytes[way]) {
    plan.reason =
        concat(row_text(plan), " in the host pool: the copy engine's, by way of the device's buffers");
    return plan;
  }
  return kernel_plan(call, row_text(plan), " in the host pool: too small for the copy engine");
}

}  // namespace

std::vector<HostRun> sorted_part(const std::vector<HostRun>& runs, int64_t first, int64_t size) {
  std::vector<HostRun> part;
  const auto ends_before = [](const HostRun& run, int64_t entry) {
    return run.first_entry + run.length <= entry;
  };
  for (auto run = std::lower_bound(runs.begin(), runs.end(), first, ends_before);
       run != runs.end() && run->first_entry < first + size; ++run) {
    const int64_t begin = std::max(run->first_entry, first);
    const int64_t end = std::min(run->first_entry + run->length, first + size);
    part.push_back({run->host_slot + begin - run->first_entry, begin, end - begin});
  }
  std::stable_sort(part.begin(), part.end(),
                   [](const HostRun& a, const HostRun& b) { return a.host_slot < b.host_slot; });
  return part;
}

MethodTable method_table_from(const std::vector<int64_t>& values) {
  if (values.size() != kMethodTableSize)
    throw std::invalid_argument(
        concat("[method_table] ", kMethodTableSize, " values are needed, got ", values.size(), "."));
  MethodTable table;
  table.copy_engine_min_row_bytes[0] = values[0];
  table.copy_engine_min_row_bytes[1] = values[1];
  table.staged_min_row_bytes[0] = values[2];
  table.staged_min_row_bytes[1] = values[3];
  table.min_bytes = values[4];
  table.sort_min_span_bytes = values[5];
  table.staging_bytes = values[6];
  table.staging_buffers = values[7];
  for (int i = 0; i < 6; ++i)
    if (values[i] < 0)
      throw std::invalid_argument(
          concat("[method_table] value ", i, " must not be negative, got ", values[i], "."));
  if (table.staging_bytes < (int64_t{1} << 16) || table.staging_buffers < 1)
    throw std::invalid_argument(concat("[method_table] staging needs at least 1 buffer of 65536 bytes, got ",
                                       table.staging_buffers, " of ", table.staging_bytes, "."));
  return table;
}

const char* method_name(Method method) {
  switch (method) {
    case Method::kKernel:
      return "kernel";
    case Method::kCopyEngine:
      return "copy_engine";
    case Method::kStaged:
      return "staged";
    default:
      return "auto";
  }
}

std::string plan_text(const Plan& plan) {
  return concat("{\"method\": \"", method_name(plan.method), "\", \"runs\": ", plan.runs,
                ", \"rows\": ", plan.rows, ", \"batches\": ", plan.batches, ", \"bytes\": ", plan.bytes,
                ", \"reason\": \"", plan.reason, "\"}");
}

Plan choose_method(const TransferArgs& args, Direction direction, bool capturing, const MethodTable& table,
                   bool explains) {
  const Call call{args, direction, capturing, table, explains};
  if (capturing && (args.dst_indices.is_cpu || args.src_indices.is_cpu))
    refuse("indices on the CPU can't be captured, their values would be baked into the graph; put them on ",
           device_name(args.device), ".");
  if (capturing && args.method != Method::kAuto && args.method != Method::kKernel)
    refuse("method '", method_name(args.method), "' can't be captured; use 'auto' or 'kernel'.");
  std::string why_not;
  switch (args.method) {
    case Method::kKernel:
      why_not = no_kernel(call);
      if (why_not.empty())
        return kernel_plan(call, "asked for");
      break;
    case Method::kCopyEngine:
      why_not = no_copy_engine(call);
      if (why_not.empty())
        return copy_engine_plan(call, "asked for");
      break;
    case Method::kStaged:
      why_not = no_staged(call);
      if (why_not.empty())
        return staged_plan(call, "asked for");
      break;
    default:
      return choose_freely(call);
  }
  refuse(why_not, ".");
}

}  // namespace hicache
