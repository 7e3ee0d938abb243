// Host memory that this library registered with a device's runtime: which device address stands for a
// host address, and where one registration ends and the next begins. Nothing of a vendor is in here.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

namespace hicache {

class HostRegistrations {
 public:
  void add(const char* host, size_t nbytes, const char* device) {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    by_host_[host] = {nbytes, device};
  }

  // False where no registration of ours begins at `host`.
  bool remove(const char* host) {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    return by_host_.erase(host) != 0;
  }

  // The device's address of [begin, end), which may lie in several registrations if these are neighbours
  // for the host and for the device. Null where that is not so.
  const char* device_address(const char* begin, const char* end) const {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    auto at = by_host_.upper_bound(begin);
    if (at == by_host_.begin())
      return nullptr;
    --at;
    const char* const device = at->second.device + (begin - at->first);
    const char* known_end = at->first + at->second.nbytes;
    if (begin >= known_end)
      return nullptr;
    while (known_end < end) {
      ++at;
      if (at == by_host_.end() || at->first != known_end || at->second.device != device + (known_end - begin))
        return nullptr;
      known_end += at->second.nbytes;
    }
    return device;
  }

  // The addresses strictly inside [begin, end), ascending, at which a registration begins or ends. One copy
  // by a DMA engine may not go over such an address.
  std::vector<const char*> seams(const char* begin, const char* end) const {
    std::vector<const char*> found;
    const auto note = [&](const char* edge) {
      if (begin < edge && edge < end && (found.empty() || found.back() != edge))
        found.push_back(edge);
    };
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    auto at = by_host_.upper_bound(begin);
    if (at != by_host_.begin())
      --at;
    for (; at != by_host_.end() && at->first < end; ++at) {
      note(at->first);
      note(at->first + at->second.nbytes);
    }
    return found;
  }

  // Whether the device knows memory of ours by this address.
  bool holds_device_address(const char* address) const {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    for (const auto& [host, registration] : by_host_)
      if (address >= registration.device && address < registration.device + registration.nbytes)
        return true;
    return false;
  }

 private:
  struct Registration {
    size_t nbytes;
    const char* device;
  };
  mutable std::shared_mutex mutex_;
  std::map<const char*, Registration> by_host_;
};

}  // namespace hicache
