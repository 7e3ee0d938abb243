// Executes a kernel's machine code: wave after wave, each to its end. The start state follows LLVM's "User
// Guide for AMDGPU Backend" (initial kernel execution state).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "wave.h"

namespace hip_interpreter {
namespace {

constexpr uint64_t kMaxSteps = uint64_t{1} << 22;  // of one wave: more is a loop without an end

std::string disassemble(const hip_sim::Launch& launch) {
  char path[] = "/tmp/hip_interpreter_XXXXXX";
  const int file = mkstemp(path);
  const auto& elf = launch.code->elf;
  const bool written = file >= 0 && write(file, elf.data(), elf.size()) == static_cast<ssize_t>(elf.size());
  close(file);
  const std::string command = std::string(std::getenv("HIP_SIM_OBJDUMP")) +
                              " -d --no-show-raw-insn --disassemble-symbols=" + launch.kernel + " " + path;
  std::string text;
  if (FILE* pipe = written ? popen(command.c_str(), "r") : nullptr) {
    char buffer[4096];
    while (const size_t got = fread(buffer, 1, sizeof(buffer), pipe))
      text.append(buffer, got);
    pclose(pipe);
  }
  unlink(path);
  return text;
}

const std::vector<Instruction>& program_of(const hip_sim::Launch& launch) {
  static auto* programs = new std::map<std::string, std::vector<Instruction>>;
  auto& program = (*programs)[launch.arch + launch.kernel];
  if (program.empty())
    program = decode(disassemble(launch));
  if (program.empty())
    throw std::runtime_error("hip_interpreter: no disassembly of " + launch.kernel);
  return program;
}

hip_sim::KernelDescriptor descriptor_of(const hip_sim::Launch& launch) {
  hip_sim::KernelDescriptor descriptor;
  std::memcpy(&descriptor, launch.code->symbol(launch.kernel + ".kd"), sizeof(descriptor));
  return descriptor;
}

struct Start {
  int lanes;
  int kernarg_scalar;  // the parameters' address lies in this register and the next
  int block_scalar;
};

Start start_of(const hip_sim::Launch& launch, const hip_sim::KernelDescriptor& descriptor) {
  constexpr int kBuffer = 1, kKernarg = 8, kWave32 = 1 << 10, kKnown = kBuffer | kKernarg | kWave32;
  if ((descriptor.properties & ~kKnown) != 0 || (descriptor.properties & kKernarg) == 0 ||
      descriptor.preload != 0)
    throw std::runtime_error("hip_interpreter: an unknown start state of " + launch.kernel);
  if (descriptor.private_segment_bytes != 0 || descriptor.group_segment_bytes != 0)
    throw std::runtime_error("hip_interpreter: scratch or shared memory in " + launch.kernel);
  const int user_scalars = descriptor.rsrc2 >> 1 & 31;
  const bool in_ttmp = launch.arch.rfind("gfx12", 0) == 0;
  return {descriptor.properties & kWave32 ? 32 : 64, descriptor.properties & kBuffer ? 4 : 0,
          in_ttmp ? kTtmp + 9 : user_scalars};
}

// The kernel's own parameters, then those of the runtime: the grid's size, the block's.
std::vector<char> kernarg_of(const hip_sim::Launch& launch, const hip_sim::KernelDescriptor& descriptor) {
  std::vector<char> kernarg(descriptor.kernarg_bytes);
  std::memcpy(kernarg.data(), launch.parameters.data(), launch.parameters.size());
  char* implicit = kernarg.data() + launch.parameters.size();
  const uint32_t blocks[3] = {launch.blocks, 1, 1};
  const uint16_t threads[3] = {static_cast<uint16_t>(launch.threads), 1, 1};
  std::memcpy(implicit, blocks, sizeof(blocks));
  std::memcpy(implicit + sizeof(blocks), threads, sizeof(threads));
  return kernarg;
}

// How many instructions it took.
uint64_t run(Wave& wave, const std::vector<Instruction>& program) {
  uint64_t steps = 0;
  for (; !wave.ended; ++steps) {
    if (steps == kMaxSteps || wave.next >= program.size())
      throw std::runtime_error("hip_interpreter: a wave that does not end");
    const Instruction& instruction = program[wave.next++];
    instruction.handler(wave, instruction);
  }
  return steps;
}

}  // namespace
}  // namespace hip_interpreter

extern "C" __attribute__((visibility("default"))) void hip_sim_execute(const hip_sim::Launch& launch) {
  using namespace hip_interpreter;
  const auto& program = program_of(launch);
  const hip_sim::KernelDescriptor descriptor = descriptor_of(launch);
  const Start start = start_of(launch, descriptor);
  const std::vector<char> kernarg = kernarg_of(launch, descriptor);
  const auto address = reinterpret_cast<uintptr_t>(kernarg.data());
  uint64_t steps = 0;
  for (unsigned block = 0; block < launch.blocks; ++block)
    for (unsigned first = 0; first < launch.threads; first += start.lanes) {
      auto wave = std::make_unique<Wave>();
      // What a kernel must not rely on is not zero.
      std::memset(wave->scalars, 0xa5, sizeof(wave->scalars));
      std::memset(wave->vectors, 0x5a, sizeof(wave->vectors));
      wave->lanes = start.lanes;
      wave->launch = &launch;
      wave->kernarg = &kernarg;
      wave->scalars[kNull] = wave->scalars[kNull + 1] = 0;
      wave->scalars[start.kernarg_scalar] = static_cast<uint32_t>(address);
      wave->scalars[start.kernarg_scalar + 1] = static_cast<uint32_t>(address >> 32);
      wave->scalars[start.block_scalar] = block;
      uint64_t active = 0;
      for (int lane = 0; lane < start.lanes; ++lane) {
        wave->vectors[0][lane] = first + lane;
        active |= uint64_t{first + lane < launch.threads} << lane;
      }
      wave->set_mask(kExec, active);
      steps += run(*wave, program);
    }
  if (std::getenv("HIP_SIM_COUNT") != nullptr)
    std::fprintf(stderr, "%s: %llu instructions\n", launch.kernel.c_str(),
                 static_cast<unsigned long long>(steps));
}
