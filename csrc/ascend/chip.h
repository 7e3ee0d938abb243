// What the backend asks of a chip, once for each device, and how many devices its tables hold.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hicache {

constexpr int kMaxDevices = 128;
// Its place in tables of kMaxDevices; throws std::runtime_error for an index beyond them.
size_t device_place(int32_t device_index);

struct Chip {
  int64_t vector_cores;
  int64_t buffer_bytes;  // unified buffer of one core
};
const Chip& chip_of(int32_t device_index);

}  // namespace hicache
