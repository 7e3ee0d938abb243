#include "code_objects.h"

#include <elf.h>

#include <cstring>
#include <stdexcept>

namespace hip_sim {
namespace {

constexpr char kMagic[] = "__CLANG_OFFLOAD_BUNDLE__";
constexpr uint32_t kImplicitBytes = 256;  // code object version 5

uint64_t read_uint64(const char*& at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  at += sizeof(value);
  return value;
}

}  // namespace

std::map<std::string, CodeObject> unbundle(const char* bundle) {
  std::map<std::string, CodeObject> objects;
  if (std::memcmp(bundle, kMagic, sizeof(kMagic) - 1) != 0)
    throw std::runtime_error("not a bundle of code objects");
  const char* at = bundle + sizeof(kMagic) - 1;
  for (uint64_t left = read_uint64(at); left > 0; --left) {
    const uint64_t offset = read_uint64(at), nbytes = read_uint64(at), name_bytes = read_uint64(at);
    const std::string name(at, name_bytes);
    at += name_bytes;
    if (name.find("amdgcn") != std::string::npos)
      objects[name.substr(name.rfind('-') + 1)].elf.assign(bundle + offset, bundle + offset + nbytes);
  }
  return objects;
}

const char* CodeObject::symbol(const std::string& name) const {
  const char* file = elf.data();
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(file);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(file + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_DYNSYM)
      continue;
    const char* names = file + sections[sections[i].sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(file + sections[i].sh_offset);
    for (size_t k = 0; k < sections[i].sh_size / sizeof(Elf64_Sym); ++k) {
      if (name != names + symbols[k].st_name)
        continue;
      const Elf64_Shdr& section = sections[symbols[k].st_shndx];
      return file + section.sh_offset + (symbols[k].st_value - section.sh_addr);
    }
  }
  return nullptr;
}

uint32_t CodeObject::parameter_bytes(const std::string& kernel) const {
  KernelDescriptor descriptor;
  const char* at = symbol(kernel + ".kd");
  if (at == nullptr)
    throw std::runtime_error("no kernel " + kernel);
  std::memcpy(&descriptor, at, sizeof(descriptor));
  return descriptor.kernarg_bytes - kImplicitBytes;
}

}  // namespace hip_sim
