// The part of AscendC that kv_exchange_kernel.cpp uses, for an ordinary C++ compiler: the kernel's own source
// runs on the simulated driver's memory.
//
// Pipes run late. A transfer is only noted when it is issued; it runs when a flag that somebody waits for
// says so, or at the end. Two schedules are the extremes of what hardware may do: all loads as early as the
// flags allow and all stores as late, or the reverse. A missing flag gives wrong bytes in one of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sim.h"

#define __aicore__
#define __global__
#define __gm__
using GM_ADDR = uint8_t*;
#define KERNEL_TASK_TYPE_DEFAULT(type) static_cast<void>(0)
enum TEventID { EVENT_ID0 };

namespace emulation {

constexpr int64_t kBlockBytes = 32;

struct Counters {
  int64_t launches, load_requests, store_requests, loaded_bytes, stored_bytes, max_buffers_in_flight, blocks;
};
struct Settings {
  int64_t buffer_bytes = 196608;
  bool backward = false;      // the last core first
  bool stores_first = false;  // which pipe runs ahead
};
extern Counters counters;
extern Settings settings;

[[noreturn]] inline void fail(const std::string& text) {
  throw std::runtime_error(text);
}

inline char* reach(const void* address, int64_t nbytes) {
  char* bytes = sim::find(address, static_cast<size_t>(nbytes), sim::Reach::kAiCore);
  if (bytes == nullptr)
    fail("an AI core can't reach " + std::to_string(nbytes) + " bytes at " +
         std::to_string(reinterpret_cast<uintptr_t>(address)));
  return bytes;
}

enum Pipe { kLoads, kStores, kScalar, kPipes };

// One AI-vector core while it runs a kernel.
class Core {
 public:
  int64_t index = 0, count = 1;

  uint8_t* allocate(int64_t nbytes) {
    if (used_ + nbytes > settings.buffer_bytes)
      fail("the unified buffer overflows: " + std::to_string(used_ + nbytes) + " bytes");
    uint8_t* at = begin_ + used_;
    used_ += (nbytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    return at;
  }

  void issue(Pipe pipe, std::function<void()> work) {
    queues_[pipe].push_back({std::move(work), -1, 0});
    ++issued_[pipe];
  }

  // `to` may not pass this point before `from` has passed where it set the flag.
  void set_flag(Pipe from, Pipe to, int id) {
    flags_[{from * kPipes + to, id}].push_back(issued_[from]);
  }
  void wait_flag(Pipe from, Pipe to, int id) {
    auto& set = flags_[{from * kPipes + to, id}];
    if (set.empty())
      fail("a wait for a flag that nobody has set: the core would hang");
    const int64_t until = set.front();
    set.pop_front();
    if (to == kScalar)
      run(from, until);
    else {
      queues_[to].push_back({[] {}, from, until});
      ++issued_[to];
    }
  }

  // All of `pipe` that was issued up to a number, and first what it waits for.
  void run(Pipe pipe, int64_t until) {
    while (done_[pipe] < until) {
      Item item = std::move(queues_[pipe].front());
      queues_[pipe].pop_front();
      if (item.waits_for >= 0)
        run(static_cast<Pipe>(item.waits_for), item.until);
      item.work();
      ++done_[pipe];
    }
  }

  void finish() {
    run_ahead();
    for (int pipe = 0; pipe < kPipes; ++pipe)
      run_all(static_cast<Pipe>(pipe));
    for (const auto& [id, set] : flags_)
      if (!set.empty() && id.second >= 0)
        fail("a flag was set and never waited for");
  }

  void run_all(Pipe pipe) {
    run(pipe, issued_[pipe]);
  }
  // Right after a transfer is issued: the pipe that runs ahead does so.
  void run_ahead() {
    run_all(settings.stores_first ? kStores : kLoads);
  }

 private:
  struct Item {
    std::function<void()> work;
    int waits_for;
    int64_t until;
  };
  std::vector<uint8_t> memory_ =
      std::vector<uint8_t>(static_cast<size_t>(settings.buffer_bytes + kBlockBytes), 0xEE);
  uint8_t* begin_ = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data())) % kBlockBytes;
  int64_t used_ = 0;
  std::deque<Item> queues_[kPipes];
  int64_t issued_[kPipes] = {}, done_[kPipes] = {};
  std::map<std::pair<int, int>, std::deque<int64_t>> flags_;
};

extern thread_local Core* core;

}  // namespace emulation

namespace AscendC {

enum class HardEvent { MTE2_S, S_MTE3, MTE2_MTE3, MTE3_MTE2 };
enum class TPosition { VECIN, VECOUT, VECCALC };

struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride, rsv;
};
template <typename T>
struct DataCopyPadExtParams {
  bool isPad;
  uint8_t leftPadding, rightPadding;
  T paddingValue;
};

inline int64_t GetBlockIdx() {
  return emulation::core->index;
}
inline int64_t GetBlockNum() {
  return emulation::core->count;
}

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* address) {
    address_ = address;
  }
  T GetValue(uint64_t i) const {
    T value;
    std::memcpy(&value, emulation::reach(address_ + i, sizeof(T)), sizeof(T));
    return value;
  }
  T* address() const {
    return address_;
  }

 private:
  T* address_ = nullptr;
};

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(uint8_t* begin, int64_t nbytes) : begin_(begin), nbytes_(nbytes) {}

  LocalTensor operator[](uint32_t offset) const {
    return {begin_ + offset * sizeof(T), nbytes_ - static_cast<int64_t>(offset * sizeof(T))};
  }
  T GetValue(uint32_t i) const {
    emulation::core->run_all(emulation::kScalar);
    T value;
    std::memcpy(&value, at(i), sizeof(T));
    return value;
  }
  // Reaches the buffer late too: a transfer that reads it needs a flag.
  void SetValue(uint32_t i, T value) const {
    emulation::core->issue(emulation::kScalar, [to = at(i), value] { std::memcpy(to, &value, sizeof(T)); });
  }
  uint8_t* begin() const {
    return begin_;
  }
  int64_t nbytes() const {
    return nbytes_;
  }

 private:
  uint8_t* at(uint32_t i) const {
    if (static_cast<int64_t>((i + 1) * sizeof(T)) > nbytes_)
      emulation::fail("an access past the end of a buffer");
    return begin_ + i * sizeof(T);
  }
  uint8_t* begin_ = nullptr;
  int64_t nbytes_ = 0;
};

namespace detail {

inline void check(const uint8_t* begin, int64_t nbytes, const DataCopyExtParams& shape) {
  const int64_t row =
      (shape.blockLen + emulation::kBlockBytes - 1) / emulation::kBlockBytes * emulation::kBlockBytes;
  if (reinterpret_cast<uintptr_t>(begin) % emulation::kBlockBytes != 0)
    emulation::fail("a buffer address that is no multiple of 32");
  if (shape.blockCount == 0 || shape.blockCount > 4095 || shape.blockLen == 0 || shape.blockLen > 2097151)
    emulation::fail("blockCount or blockLen is out of range");
  if (shape.blockCount * row > nbytes)
    emulation::fail("a transfer past the end of a buffer");
}

inline int64_t padded(uint32_t nbytes) {
  return (nbytes + emulation::kBlockBytes - 1) / emulation::kBlockBytes * emulation::kBlockBytes;
}

}  // namespace detail

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& shape,
                 const DataCopyPadExtParams<T>&) {
  detail::check(dst.begin(), dst.nbytes(), shape);
  ++emulation::counters.load_requests;
  emulation::counters.loaded_bytes += int64_t{shape.blockCount} * shape.blockLen;
  emulation::core->issue(emulation::kLoads, [to = dst.begin(), from = src.address(), shape] {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int64_t row = 0; row < shape.blockCount; ++row) {
      uint8_t* at = to + row * detail::padded(shape.blockLen);
      std::memset(at, 0xDD,
                  static_cast<size_t>(detail::padded(shape.blockLen)));  // what pads a row is not promised
      std::memcpy(at,
                  emulation::reach(bytes + row * (int64_t{shape.blockLen} + shape.srcStride), shape.blockLen),
                  shape.blockLen);
    }
  });
  emulation::core->run_ahead();
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& shape) {
  detail::check(src.begin(), src.nbytes(), shape);
  ++emulation::counters.store_requests;
  emulation::counters.stored_bytes += int64_t{shape.blockCount} * shape.blockLen;
  emulation::core->issue(emulation::kStores, [to = dst.address(), from = src.begin(), shape] {
    char* bytes = reinterpret_cast<char*>(to);
    for (int64_t row = 0; row < shape.blockCount; ++row)
      std::memcpy(emulation::reach(bytes + row * (int64_t{shape.blockLen} + shape.dstStride), shape.blockLen),
                  from + row * detail::padded(shape.blockLen), shape.blockLen);
  });
  emulation::core->run_ahead();
}

namespace detail {
constexpr std::pair<emulation::Pipe, emulation::Pipe> pipes(HardEvent event) {
  switch (event) {
    case HardEvent::MTE2_S:
      return {emulation::kLoads, emulation::kScalar};
    case HardEvent::S_MTE3:
      return {emulation::kScalar, emulation::kStores};
    case HardEvent::MTE2_MTE3:
      return {emulation::kLoads, emulation::kStores};
    default:
      return {emulation::kStores, emulation::kLoads};
  }
}
}  // namespace detail

template <HardEvent event>
void SetFlag(int32_t id) {
  emulation::core->set_flag(detail::pipes(event).first, detail::pipes(event).second, id);
}
template <HardEvent event>
void WaitFlag(int32_t id) {
  emulation::core->wait_flag(detail::pipes(event).first, detail::pipes(event).second, id);
}

// Buffers between loads and stores. A flag for each buffer and direction, as TQueBind has.
template <TPosition, TPosition, int32_t depth>
class TQueBind {
 public:
  void init(int64_t count, int64_t nbytes) {
    for (int64_t i = 0; i < count; ++i)
      free_.push_back({emulation::core->allocate(nbytes), static_cast<int>(i)});
    nbytes_ = nbytes;
  }
  template <typename T>
  LocalTensor<T> AllocTensor() {
    if (free_.empty())
      emulation::fail("no buffer is free: the core would hang");
    Slot slot = free_.front();
    free_.pop_front();
    if (slot.was_used)
      emulation::core->wait_flag(emulation::kStores, emulation::kLoads, -1 - slot.id);
    slot.was_used = true;
    in_use_[slot.begin] = slot;
    auto& most = emulation::counters.max_buffers_in_flight;
    most = std::max<int64_t>(most, static_cast<int64_t>(in_use_.size()));
    return {slot.begin, nbytes_};
  }
  template <typename T>
  void EnQue(const LocalTensor<T>& tensor) {
    if (full_.size() == depth)
      emulation::fail("the queue is full: the core would hang");
    emulation::core->set_flag(emulation::kLoads, emulation::kStores, -1 - in_use_.at(tensor.begin()).id);
    full_.push_back(tensor.begin());
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    if (full_.empty())
      emulation::fail("nothing is queued: the core would hang");
    uint8_t* begin = full_.front();
    full_.pop_front();
    emulation::core->wait_flag(emulation::kLoads, emulation::kStores, -1 - in_use_.at(begin).id);
    return {begin, nbytes_};
  }
  template <typename T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    const Slot slot = in_use_.at(tensor.begin());
    in_use_.erase(tensor.begin());
    emulation::core->set_flag(emulation::kStores, emulation::kLoads, -1 - slot.id);
    free_.push_back(slot);
  }

 private:
  struct Slot {
    uint8_t* begin;
    int id;
    bool was_used = false;
  };
  std::deque<Slot> free_;
  std::map<uint8_t*, Slot> in_use_;
  std::deque<uint8_t*> full_;
  int64_t nbytes_ = 0;
};

template <TPosition>
class TBuf {
 public:
  void init(int64_t nbytes) {
    begin_ = emulation::core->allocate(nbytes);
    nbytes_ = nbytes;
  }
  template <typename T>
  LocalTensor<T> Get() const {
    return {begin_, nbytes_};
  }

 private:
  uint8_t* begin_ = nullptr;
  int64_t nbytes_ = 0;
};

class TPipe {
 public:
  template <TPosition from, TPosition to, int32_t depth>
  bool InitBuffer(TQueBind<from, to, depth>& queue, uint8_t count, uint32_t nbytes) {
    queue.init(count, nbytes);
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t nbytes) {
    buffer.init(nbytes);
    return true;
  }
};

}  // namespace AscendC
