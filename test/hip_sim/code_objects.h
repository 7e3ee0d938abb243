// The code objects that a program registers, and what launching needs to know of their kernels.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hip_sim {

struct CodeObject {
  std::vector<char> elf;

  // The first byte of a symbol; null without one.
  const char* symbol(const std::string& name) const;
  // Bytes of the kernel's own parameters, which the runtime's follow.
  uint32_t parameter_bytes(const std::string& kernel) const;
};

// By GPU, such as "gfx942", out of clang's bundle.
std::map<std::string, CodeObject> unbundle(const char* bundle);

// A kernel's descriptor, as the GPU reads it (64 bytes).
struct KernelDescriptor {
  uint32_t group_segment_bytes;
  uint32_t private_segment_bytes;
  uint32_t kernarg_bytes;
  uint32_t reserved0;
  int64_t code_offset;
  uint32_t reserved1[5];
  uint32_t rsrc3;
  uint32_t rsrc1;
  uint32_t rsrc2;
  uint16_t properties;
  uint16_t preload;
  uint32_t reserved2;
};
static_assert(sizeof(KernelDescriptor) == 64);

}  // namespace hip_sim
