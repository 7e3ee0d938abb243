// What a GPU's backend keeps for each device: error records, a number for each call, the table of methods, and
// the streams for copies.
#pragma once

#include <cstdint>
#include <vector>

#include "error_record.cuh"
#include "plan.h"
#include "transfer_kv.h"

namespace hicache {

// The sink for one more call on `device_index`, which must be the current device: the record that this thread
// uses, else the device's own. Allocates on first use.
ErrorSink next_error_sink(int32_t device_index);

// Throws the error of an earlier call that is in the device's own record, if there is one, and clears it. Reads
// host memory only. A thread that uses another record is not told.
void throw_recorded_error(const Device& device, bool is_later_call);

MethodTable method_table(int32_t device_index);

// The ops of these names.
void check_errors(const Tensor& on_device);
int64_t new_error_record(const Tensor& on_device);
void free_error_record(const Tensor& on_device, int64_t handle);
void use_error_record(const Tensor& on_device, int64_t handle);
void check_error_record(const Tensor& on_device, int64_t handle);
void set_method_table(const Tensor& on_device, const std::vector<int64_t>& values);

}  // namespace hicache
