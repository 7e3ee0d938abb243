// How a kernel reports a bad index without a host sync: the first bad entry (by call, then by position)
// of a device is kept in page-locked host memory until the host has read it. Shared by CUDA and HIP.
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

#if defined(__CUDACC__) || defined(__HIPCC__)
// Rare, so simple: a spin lock. The critical section lies inside the loop, so that lanes which run in
// lockstep can't wait for each other.
__device__ inline void record_error(const ErrorSink& sink, BadValue what, int64_t position, int64_t value,
                                    int64_t limit) {
  const uint32_t epoch = sink.record->epoch;
  volatile ErrorLock* lock = sink.lock;
  const auto comes_later = [&] {
    return lock->epoch == epoch &&
           (lock->call < sink.call || (lock->call == sink.call && lock->position <= position));
  };
  for (bool done = comes_later(); !done;) {
    if (atomicCAS(&sink.lock->locked, 0u, 1u) != 0u)
      continue;
    __threadfence();
    if (!comes_later()) {
      lock->epoch = epoch;
      lock->call = sink.call;
      lock->position = position;
      const uint32_t sequence = sink.record->sequence;
      sink.record->sequence = sequence + 1;
      __threadfence_system();
      sink.record->what = static_cast<int32_t>(what);
      sink.record->call = sink.call;
      sink.record->position = position;
      sink.record->value = value;
      sink.record->limit = limit;
      sink.record->published = epoch;
      __threadfence_system();
      sink.record->sequence = sequence + 2;
      __threadfence_system();
    }
    __threadfence();
    atomicExch(&sink.lock->locked, 0u);
    done = true;
  }
}
#endif

}  // namespace hicache
