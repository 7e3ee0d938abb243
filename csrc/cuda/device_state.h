// What the CUDA backend keeps for each device: error records, a number for each call, the table of methods, and
// the streams for copies (streams.h).
#pragma once

#include "../error_record.cuh"
#include "../plan.h"

#include <cstdint>

namespace hicache {

// The sink for one more call on `device_index`, which must be the current device: the record that this thread
// uses, else the device's own. Allocates on first use.
ErrorSink next_error_sink(int32_t device_index);

// Throws the error of an earlier call that is in the device's own record, if there is one, and clears it. Reads
// host memory only. A thread that uses another record is not told.
void throw_recorded_error(int32_t device_index, bool is_later_call);

MethodTable method_table(int32_t device_index);

}  // namespace hicache
