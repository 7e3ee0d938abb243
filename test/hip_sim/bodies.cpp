// Executes kernels by host-built bodies of the same source, one thread after another.
#include "../../csrc/hip/copy_kernels.hip"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

#include "runtime.h"

extern "C" __attribute__((visibility("default"))) void hip_sim_execute(const hip_sim::Launch& launch) {
  using hicache::CopyParams;
  // Both compilers give the kernels the same names.
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&hip_sim_execute), &here);
  auto* kernel = reinterpret_cast<void (*)(CopyParams)>(
      dlsym(dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD), launch.kernel.c_str()));
  if (kernel == nullptr || launch.parameters.size() != sizeof(CopyParams))
    throw std::runtime_error("no host-built body for " + launch.kernel);
  CopyParams params;
  std::memcpy(&params, launch.parameters.data(), sizeof(params));
  hip_sim_thread.blocks = launch.blocks;
  for (hip_sim_thread.block = 0; hip_sim_thread.block < launch.blocks; ++hip_sim_thread.block)
    for (hip_sim_thread.thread = 0; hip_sim_thread.thread < launch.threads; ++hip_sim_thread.thread)
      kernel(params);
}
