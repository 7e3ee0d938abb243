// What the CUDA backend keeps for each device: the error record and a number for each call.
#pragma once

#include "../error_record.cuh"

#include <cstdint>

namespace hicache {

// The sink for one more call on `device_index`, which must be the current device. Allocates on first use.
ErrorSink next_error_sink(int32_t device_index);

// Throws the recorded error of an earlier call, if there is one, and clears it. Reads host memory only.
void throw_recorded_error(int32_t device_index, bool is_later_call);

}  // namespace hicache
