// The names of the errors that the simulated runtime gives.
#include <hip/hip_runtime_api.h>

extern "C" {

const char* hipGetErrorName(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "hipSuccess";
    case hipErrorInvalidValue:
      return "hipErrorInvalidValue";
    case hipErrorOutOfMemory:
      return "hipErrorOutOfMemory";
    case hipErrorNoBinaryForGpu:
      return "hipErrorNoBinaryForGpu";
    case hipErrorLaunchFailure:
      return "hipErrorLaunchFailure";
    case hipErrorNoDevice:
      return "hipErrorNoDevice";
    default:
      return "hipErrorUnknown";
  }
}
const char* hipGetErrorString(hipError_t error) {
  return error == hipErrorNoBinaryForGpu ? "no kernel image is available for execution on the device"
                                         : "simulated";
}

}  // extern "C"
