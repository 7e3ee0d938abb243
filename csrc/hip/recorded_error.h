// The host's side of error_record.cuh: what a kernel has recorded, as an exception.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

#include "../error_record.cuh"
#include "../text.h"

namespace hicache {

// Throws what `record` holds (which must be published) and clears it. One thread at a time for one record.
[[noreturn]] inline void throw_and_clear(ErrorRecord& record, const std::string& device, bool is_later_call) {
  int32_t what;
  int64_t call, position, value, limit;
  uint32_t sequence;
  do {  // a kernel that still runs may replace the entry by an earlier one
    sequence = record.sequence;
    std::atomic_thread_fence(std::memory_order_acquire);
    what = record.what;
    call = record.call;
    position = record.position;
    value = record.value;
    limit = record.limit;
    std::atomic_thread_fence(std::memory_order_acquire);
  } while (sequence % 2 != 0 || sequence != record.sequence);
  record.epoch = record.epoch + 1;

  const std::string call_text = concat("[transfer_kv] ", is_later_call ? "an earlier call failed: " : "",
                                       "call ", call, " on ", device, ": ");
  if (what == static_cast<int32_t>(BadValue::kCount))
    throw std::out_of_range(
        concat(call_text, "count is ", value, ", outside 0 to ", limit, ", and was clamped."));
  const char* name = what == static_cast<int32_t>(BadValue::kDstIndex) ? "dst_indices[" : "src_indices[";
  throw std::out_of_range(concat(call_text, name, position, "] is ", value, ", out of range for ", limit,
                                 " slots (-1 skips an entry). The entry was skipped, the others were copied."));
}

}  // namespace hicache
