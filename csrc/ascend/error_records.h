// Records of bad indices: where the cores report, and what of it has arrived on the host. Each device has one
// of its own; transfers of an engine report into a record of their ticket's.
#pragma once

#include <cstdint>

namespace hicache {

struct ErrorRecord;

// Where a kernel of the next call reports: one pair of lines a core (kv_exchange_params.h).
struct ErrorSink {
  ErrorRecord* record;
  int64_t device_address;
  int64_t cores;
  int64_t call;
};
// For a call on `device_index`, the current device, into the record that this thread uses. Allocates on first
// use.
ErrorSink next_error_sink(int32_t device_index, void* stream);

// After a launch that may report: brings the record to the host in stream order.
void fetch_errors(const ErrorSink& sink, void* stream);

// Throws the first error that has arrived in the device's own record and was not thrown yet, and lets the cores
// report again from here on in `stream`. Waits for nothing. A thread that uses another record is not told.
void throw_recorded_error(int32_t device_index, void* stream, bool is_later_call);

}  // namespace hicache
