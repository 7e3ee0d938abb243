#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace hip_sim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;

size_t round_up(size_t value, size_t to) {
  return (value + to - 1) / to * to;
}

// Inaccessible memory around `nbytes` that come from `file`, or from nowhere.
char* map_with_guards(size_t nbytes, int file) {
  char* all = static_cast<char*>(
      mmap(nullptr, nbytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (all == MAP_FAILED)
    return nullptr;
  if (file >= 0 && mmap(all + kPage, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    munmap(all, nbytes + 2 * kPage);
    return nullptr;
  }
  return all;
}

template <typename Map>
auto* find_in(Map& blocks, const void* address) {
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  return after == blocks.begin() ? nullptr : &*std::prev(after);
}

}  // namespace

Block* Memory::add(const Block& block) {
  Block* added = &(by_device_[block.device] = block);
  if (block.host != nullptr)
    by_host_[block.host] = added;
  protect(*added);
  return added;
}

void Memory::protect(const Block& block) {
  const int device = unlocked_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
  const int host = unlocked_ > 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
  mprotect(block.mapping + kPage, block.mapped_bytes - 2 * kPage, device);
  if (block.host == nullptr)
    return;
  // Whole pages only: what else lies in the others is not the GPU's.
  char* begin = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(block.host), kPage));
  char* end = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(block.host + block.nbytes) / kPage * kPage);
  if (begin < end)
    mprotect(begin, end - begin, host);
}

Block* Memory::allocate_device(size_t nbytes) {
  const size_t used = round_up(nbytes == 0 ? 1 : nbytes, kAlignment);
  const size_t pages = round_up(used, kPage);
  char* mapping = map_with_guards(pages, -1);
  if (mapping == nullptr)
    return nullptr;
  return add({Kind::kDevice, mapping + kPage + pages - used, nullptr, nbytes, mapping, pages + 2 * kPage});
}

Block* Memory::allocate_host(size_t nbytes) {
  const size_t pages = round_up(nbytes == 0 ? 1 : nbytes, kPage);
  char* host =
      static_cast<char*>(mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (host == MAP_FAILED)
    return nullptr;
  Block* block = register_host(host, nbytes);
  if (block == nullptr)
    munmap(host, pages);
  else
    block->kind = Kind::kAllocatedHost;
  return block;
}

Block* Memory::register_host(char* host, size_t nbytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(host) / kPage * kPage;
  const size_t pages = round_up(reinterpret_cast<uintptr_t>(host) + nbytes - begin, kPage);
  const int file = memfd_create("hip_sim", 0);
  if (file < 0 || ftruncate(file, pages) != 0)
    return nullptr;
  char* mapping = map_with_guards(pages, file);
  void* target = reinterpret_cast<void*>(begin);
  if (mapping != nullptr) {
    mprotect(mapping + kPage, pages, PROT_READ | PROT_WRITE);
    std::memcpy(mapping + kPage, target, pages);
    if (mmap(target, pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
      munmap(mapping, pages + 2 * kPage);
      mapping = nullptr;
    }
  }
  close(file);
  if (mapping == nullptr)
    return nullptr;
  char* device = mapping + kPage + (reinterpret_cast<uintptr_t>(host) - begin);
  return add({Kind::kRegisteredHost, device, host, nbytes, mapping, pages + 2 * kPage});
}

void Memory::release(Block* block) {
  const Block copy = *block;
  by_host_.erase(copy.host);
  by_device_.erase(copy.device);
  munmap(copy.mapping, copy.mapped_bytes);
  if (copy.kind == Kind::kAllocatedHost)
    munmap(copy.host, round_up(copy.nbytes == 0 ? 1 : copy.nbytes, kPage));
}

Block* Memory::find_device(const void* address) {
  auto* found = find_in(by_device_, address);
  return found != nullptr && address < found->second.device + found->second.nbytes ? &found->second : nullptr;
}

Block* Memory::find_host(const void* address) {
  auto* found = find_in(by_host_, address);
  return found != nullptr && address < found->first + found->second->nbytes ? found->second : nullptr;
}

bool Memory::is_device_range(const void* address, size_t nbytes) {
  const Block* block = find_device(address);
  return block != nullptr && static_cast<const char*>(address) + nbytes <= block->device + block->nbytes;
}

void Memory::unlock() {
  if (++unlocked_ == 1)
    for (const auto& [device, block] : by_device_)
      protect(block);
}

void Memory::lock() {
  if (--unlocked_ == 0)
    for (const auto& [device, block] : by_device_)
      protect(block);
}

}  // namespace hip_sim
