// Executes kernels by host-built bodies of the same source, one thread after another.
#include "../../csrc/hip/copy_kernels.hip"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

#include "runtime.h"

namespace {

template <typename Params>
void run_threads(void* kernel, const hip_sim::Launch& launch) {
  Params params;
  std::memcpy(&params, launch.parameters.data(), sizeof(params));
  hip_sim_thread.blocks = launch.blocks;
  for (hip_sim_thread.block = 0; hip_sim_thread.block < launch.blocks; ++hip_sim_thread.block)
    for (hip_sim_thread.thread = 0; hip_sim_thread.thread < launch.threads; ++hip_sim_thread.thread)
      reinterpret_cast<void (*)(Params)>(kernel)(params);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void hip_sim_execute(const hip_sim::Launch& launch) {
  using hicache::CopyParams;
  // Both compilers give the kernels the same names.
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&hip_sim_execute), &here);
  void* kernel = dlsym(dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD), launch.kernel.c_str());
  if (kernel == nullptr)
    throw std::runtime_error("no host-built body for " + launch.kernel);
  if (launch.parameters.size() == sizeof(CopyParams))
    run_threads<CopyParams>(kernel, launch);
  else if (launch.parameters.size() == sizeof(hicache::SelectParams))
    run_threads<hicache::SelectParams>(kernel, launch);
  else if (launch.parameters.size() == sizeof(hicache::PageParams))
    run_threads<hicache::PageParams>(kernel, launch);
  else
    throw std::runtime_error("unknown parameters of " + launch.kernel);
}
