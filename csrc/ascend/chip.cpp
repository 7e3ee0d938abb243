#include "chip.h"

#include <array>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "runtime.h"

namespace hicache {
namespace {

constexpr int kVectorCoreNum = 201;  // ACL_DEV_ATTR_VECTOR_CORE_NUM
constexpr int kBufferSize = 204;     // ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE
constexpr int kCapabilityVectorCores = 1;
constexpr int64_t kSmallestBuffer = 196608;  // 910B and 910_93; the 950 has 253952

Chip read_chip(int32_t device_index) {
  const auto device = static_cast<uint32_t>(device_index);
  const auto info = [&](int attribute) {
    int64_t value = 0;
    const bool known = driver().device_info != nullptr && driver().device_info(device, attribute, &value) == 0;
    return known ? value : 0;
  };
  Chip chip{info(kVectorCoreNum), info(kBufferSize)};
  if (chip.vector_cores <= 0 && driver().device_capability != nullptr)
    check_acl(driver().device_capability(device, kCapabilityVectorCores, &chip.vector_cores),
              "aclGetDeviceCapability");
  if (chip.vector_cores <= 0)
    throw std::runtime_error("[transfer_kv] this CANN does not tell how many AI-vector cores the device has.");
  if (chip.buffer_bytes <= 0)
    chip.buffer_bytes = kSmallestBuffer;
  return chip;
}

}  // namespace

size_t device_place(int32_t device_index) {
  if (device_index < 0 || device_index >= kMaxDevices)
    throw std::runtime_error(
        concat("[transfer_kv] device index ", device_index, " is beyond what this build can hold."));
  return static_cast<size_t>(device_index);
}

const Chip& chip_of(int32_t device_index) {
  static std::mutex mutex;
  static auto* chips = new std::array<std::unique_ptr<Chip>, kMaxDevices>;
  const std::lock_guard<std::mutex> guard(mutex);
  std::unique_ptr<Chip>& chip = (*chips)[device_place(device_index)];
  if (chip == nullptr)
    chip = std::make_unique<Chip>(read_chip(device_index));
  return *chip;
}

}  // namespace hicache
