// Streams and events of our own, and the order between them and the caller's stream.
#pragma once

#include <cuda_runtime.h>

#include "runtime.h"

namespace hicache {

class Event {
 public:
  Event() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~Event() {
    if (event_ != nullptr)
      (void)cudaEventDestroy(event_);  // the runtime keeps it until what was recorded is done
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) {
    check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  void make_wait(cudaStream_t stream) {
    check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Work on a stream beside the caller's: it starts behind what the caller's stream holds now, and the caller's
// stream goes on behind it. Joined also when an exception ends the scope, so that nothing that the work uses is
// freed or written too early.
class Fork {
 public:
  Fork(cudaStream_t caller, cudaStream_t beside) : caller_(caller), beside_(beside) {
    event_.record(caller_);
    event_.make_wait(beside_);
  }
  ~Fork() {
    if (joined_)
      return;
    try {
      join();
    } catch (const std::exception&) {
      (void)cudaStreamSynchronize(beside_);
    }
  }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  void join() {
    event_.record(beside_);
    event_.make_wait(caller_);
    joined_ = true;
  }
  cudaStream_t stream() const {
    return beside_;
  }

 private:
  cudaStream_t caller_;
  cudaStream_t beside_;
  Event event_;
  bool joined_ = false;
};

// This library's stream for copies of one direction on the current device. Shared by all calls: they queue up
// behind each other, as they would in the copy engine.
cudaStream_t copy_stream(int32_t device_index, bool is_store);

}  // namespace hicache
