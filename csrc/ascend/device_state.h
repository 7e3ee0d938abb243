// What the backend keeps for each device: the error record, a number for each call, the chip's sizes.
#pragma once

#include <cstdint>

namespace hicache {

struct Chip {
  int64_t vector_cores;
  int64_t buffer_bytes;  // unified buffer of one core
};
const Chip& chip_of(int32_t device_index);

// Where a kernel of the next call reports: one pair of lines a core (kv_exchange_params.h).
struct ErrorSink {
  int64_t device_address;
  int64_t cores;
  int64_t call;
};
// For a call on `device_index`, the current device. Allocates on first use.
ErrorSink next_error_sink(int32_t device_index);

// After a launch that may report: brings the record to the host in stream order.
void fetch_errors(int32_t device_index, void* stream);

// Throws the first error that has arrived and was not thrown yet, and lets the cores report again from here
// on in `stream`. Waits for nothing.
void throw_recorded_error(int32_t device_index, void* stream, bool is_later_call);

}  // namespace hicache
