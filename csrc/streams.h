// Streams and events of our own, and the order between them and the caller's stream. Host code that CUDA and
// HIP share.
//
// The including file supplies, from its vendor's runtime.h: GpuStream, GpuEvent, new_event, destroy_event,
// record_event, make_stream_wait, synchronize.
#pragma once

#include <cstdint>
#include <exception>

namespace hicache {

class Event {
 public:
  Event() : event_(new_event()) {}
  ~Event() {
    destroy_event(event_);  // the runtime keeps it until what was recorded is done
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(GpuStream stream) {
    record_event(event_, stream);
  }
  void make_wait(GpuStream stream) {
    make_stream_wait(stream, event_);
  }

 private:
  GpuEvent event_;
};

// Work on a stream beside the caller's: it starts behind what the caller's stream holds now, and the caller's
// stream goes on behind it. Joined also when an exception ends the scope, so that nothing that the work uses is
// freed or written too early.
class Fork {
 public:
  Fork(GpuStream caller, GpuStream beside) : caller_(caller), beside_(beside) {
    event_.record(caller_);
    event_.make_wait(beside_);
  }
  ~Fork() {
    if (joined_)
      return;
    try {
      join();
    } catch (const std::exception&) {
      wait_without_throwing();
    }
  }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  void join() {
    event_.record(beside_);
    event_.make_wait(caller_);
    joined_ = true;
  }
  GpuStream stream() const {
    return beside_;
  }

 private:
  void wait_without_throwing() {
    try {
      synchronize(beside_);
    } catch (const std::exception&) {  // the device has failed: nothing runs on it any more
    }
  }

  GpuStream caller_;
  GpuStream beside_;
  Event event_;
  bool joined_ = false;
};

// This library's stream for copies of one direction on the current device. Shared by all calls: they queue up
// behind each other, as they would in the copy engine.
GpuStream copy_stream(int32_t device_index, bool is_store);

}  // namespace hicache
