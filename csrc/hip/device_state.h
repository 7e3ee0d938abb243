// What the HIP backend keeps for each device: the error record and a number for each call.
#pragma once

#include <string>

#include "../error_record.cuh"
#include "../transfer_kv.h"

namespace hicache {

// The sink for one more call on `device`, which must be the current device. Allocates on first use.
ErrorSink next_error_sink(const Device& device);

// Throws the recorded error of an earlier call, if there is one, and clears it. Reads host memory only.
void throw_recorded_error(const Device& device, bool is_later_call);

// The op of this name, for library.cpp.
void check_errors_hip(const Tensor& on_device);

}  // namespace hicache
