// How a kernel reports a bad index without a host sync: the first bad entry (by call, then by position)
// of a device is kept in page-locked host memory until the host has read it. The device's side is
// record_error.cuh.
#pragma once

#include <cstdint>

namespace hicache {

enum class BadValue : int32_t { kDstIndex, kSrcIndex, kCount };

// In page-locked host memory. The device writes all but `epoch`.
struct ErrorRecord {
  volatile uint32_t epoch;      // counts how often the host has cleared the record
  volatile uint32_t sequence;   // odd while the device writes the fields below
  volatile uint32_t published;  // the epoch that the fields belong to
  volatile int32_t what;        // BadValue
  volatile int64_t call;
  volatile int64_t position;
  volatile int64_t value;
  volatile int64_t limit;
};

// In device memory, one for each device: serialises the writers of the record above.
struct ErrorLock {
  uint32_t locked;
  uint32_t epoch;
  int64_t call;
  int64_t position;
};

// What a kernel needs in order to report.
struct ErrorSink {
  ErrorRecord* record;  // device address
  ErrorLock* lock;      // device memory
  int64_t call;
};

}  // namespace hicache
