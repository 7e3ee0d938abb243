// The device's side of error_record.cuh.
#pragma once

#include "error_record.cuh"

namespace hicache {

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

}  // namespace hicache
