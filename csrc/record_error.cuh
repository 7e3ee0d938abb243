// The device's side of error_record.cuh. The including file supplies as_global and
// has_least_of_lockstep from its vendor's runtime.h.
#pragma once

#include <cstdint>

#include "error_record.cuh"

namespace hicache {

// Rare, so simple: a spin lock. A lane that holds the lock must not wait for another of its wavefront or warp
// that wants it, and compilers move the critical section behind the loop, where no lane arrives before all have
// had the lock: on AMD's GPUs for certain, on NVIDIA's where their scheduler does not part the lanes in time.
// So only the lane with the first position takes part. Branches that part the lanes must not have a call each:
// compilers merge the ends of both critical sections, and the lane that one has elected waits there for the
// other's, which wants the lock.
__device__ inline void record_error(const ErrorSink& sink, BadValue what, int64_t position, int64_t value,
                                    int64_t limit) {
  if (!has_least_of_lockstep(position))
    return;
  auto* record = as_global(sink.record);
  auto* atomic_lock = as_global(sink.lock);
  auto* lock = as_global(static_cast<volatile ErrorLock*>(sink.lock));
  const uint32_t epoch = record->epoch;
  const auto comes_later = [&] {
    return lock->epoch == epoch &&
           (lock->call < sink.call || (lock->call == sink.call && lock->position <= position));
  };
  for (bool done = comes_later(); !done;) {
    if (atomicCAS(&atomic_lock->locked, 0u, 1u) != 0u)
      continue;
    __threadfence();
    if (!comes_later()) {
      lock->epoch = epoch;
      lock->call = sink.call;
      lock->position = position;
      const uint32_t sequence = record->sequence;
      record->sequence = sequence + 1;
      __threadfence_system();
      record->what = static_cast<int32_t>(what);
      record->call = sink.call;
      record->position = position;
      record->value = value;
      record->limit = limit;
      record->published = epoch;
      __threadfence_system();
      record->sequence = sequence + 2;
      __threadfence_system();
    }
    __threadfence();
    atomicExch(&atomic_lock->locked, 0u);
    done = true;
  }
}

}  // namespace hicache
