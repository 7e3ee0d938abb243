// What the simulated runtime hands to an executor of kernels.
#pragma once

#include <string>
#include <vector>

#include "code_objects.h"

namespace hip_sim {

struct Launch {
  std::string kernel;
  std::string arch;
  const CodeObject* code;
  unsigned blocks;
  unsigned threads;
  std::vector<char> parameters;
  int (*is_device_range)(const void* address, size_t nbytes);
};

// The library that HIP_SIM_EXECUTOR names has this as hip_sim_execute.
using Execute = void (*)(const Launch& launch);

}  // namespace hip_sim
