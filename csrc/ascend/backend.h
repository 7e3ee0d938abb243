// The functions that the Ascend backend registers, all at the end of transfer_kv.cpp.
#pragma once

#include "../transfer_kv.h"

namespace hicache {

void check_errors_ascend(const Tensor& on_device);
int64_t new_error_record(const Tensor& on_device);
void use_error_record(const Tensor& on_device, int64_t handle);
void check_error_record(const Tensor& on_device, int64_t handle);
void free_error_record(const Tensor& on_device, int64_t handle);
void register_host_memory(const Tensor& on_device, int64_t address, int64_t nbytes);
void map_host_memory(const Tensor& on_device, int64_t address, int64_t nbytes, int64_t device_address);
void unregister_host_memory(const Tensor& on_device, int64_t address);
int64_t host_device_address(const Tensor& on_device, int64_t address, int64_t nbytes);

}  // namespace hicache
