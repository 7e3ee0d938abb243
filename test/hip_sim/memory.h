// The simulated GPU's memory, as its host sees it: device memory and the device's aliases of host memory are
// inaccessible, except while the GPU works; host memory that is mapped for the device is inaccessible then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace hip_sim {

enum class Kind { kDevice, kAllocatedHost, kRegisteredHost };

struct Block {
  Kind kind;
  char* device;   // what a kernel may use
  char* host;     // null for device memory
  size_t nbytes;  // as asked for
  char* mapping;  // of the device's address, with a guard page at either end
  size_t mapped_bytes;
};

class Memory {
 public:
  // The end of the block lies at most 255 bytes before a guard page. Null when the system has no more.
  Block* allocate_device(size_t nbytes);
  Block* allocate_host(size_t nbytes);
  // Moves what lies there into memory that has a second address.
  Block* register_host(char* host, size_t nbytes);
  void release(Block* block);

  // The block that holds an address of the device's or of the host's; null without one.
  Block* find_device(const void* address);
  Block* find_host(const void* address);

  // The GPU may use [address, address + nbytes).
  bool is_device_range(const void* address, size_t nbytes);
  // From now on the GPU works, or no longer does. Nests.
  void unlock();
  void lock();

 private:
  Block* add(const Block& block);
  void protect(const Block& block);

  std::map<const char*, Block> by_device_;
  std::map<const char*, Block*> by_host_;
  int unlocked_ = 0;
};

}  // namespace hip_sim
