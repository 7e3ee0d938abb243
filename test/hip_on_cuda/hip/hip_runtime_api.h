// HIP's names for CUDA's runtime, so that csrc/hip runs on an NVIDIA GPU: evidence for the source, not for AMD.
#pragma once

#include <cuda_runtime.h>

#define HIP_ON_CUDA_TYPE(name) using hip##name = cuda##name
HIP_ON_CUDA_TYPE(Error_t);
HIP_ON_CUDA_TYPE(Event_t);
HIP_ON_CUDA_TYPE(Stream_t);
HIP_ON_CUDA_TYPE(StreamCaptureMode);
HIP_ON_CUDA_TYPE(StreamCaptureStatus);
using hipPointerAttribute_t = cudaPointerAttributes;

constexpr auto hipSuccess = cudaSuccess;
constexpr auto hipStreamCaptureModeRelaxed = cudaStreamCaptureModeRelaxed;
constexpr auto hipStreamCaptureStatusNone = cudaStreamCaptureStatusNone;
constexpr auto hipMemoryTypeHost = cudaMemoryTypeHost;
constexpr auto hipMemoryTypeManaged = cudaMemoryTypeManaged;
constexpr auto hipDeviceAttributeMultiprocessorCount = cudaDevAttrMultiProcessorCount;
constexpr auto hipMemcpyDefault = cudaMemcpyDefault;
constexpr unsigned hipEventDisableTiming = cudaEventDisableTiming;
constexpr unsigned hipStreamNonBlocking = cudaStreamNonBlocking;
constexpr unsigned hipHostMallocMapped = cudaHostAllocMapped;
constexpr unsigned hipHostMallocPortable = cudaHostAllocPortable;
constexpr unsigned hipHostMallocCoherent = 0;  // all of it is, there
constexpr unsigned hipHostRegisterMapped = cudaHostRegisterMapped;
constexpr unsigned hipHostRegisterPortable = cudaHostRegisterPortable;

#define hipDeviceGetAttribute cudaDeviceGetAttribute
#define hipDeviceGetStreamPriorityRange cudaDeviceGetStreamPriorityRange
#define hipDeviceSynchronize cudaDeviceSynchronize
#define hipEventCreateWithFlags cudaEventCreateWithFlags
#define hipEventDestroy cudaEventDestroy
#define hipEventRecord cudaEventRecord
#define hipGetErrorName cudaGetErrorName
#define hipGetErrorString cudaGetErrorString
#define hipGetLastError cudaGetLastError
#define hipGetSymbolAddress cudaGetSymbolAddress
#define hipHostFree cudaFreeHost
#define hipHostGetDevicePointer cudaHostGetDevicePointer
#define hipHostMalloc cudaHostAlloc
#define hipHostRegister cudaHostRegister
#define hipHostUnregister cudaHostUnregister
#define hipLaunchKernel cudaLaunchKernel
#define hipMalloc cudaMalloc
#define hipMemcpy2DAsync cudaMemcpy2DAsync
#define hipMemcpyAsync cudaMemcpyAsync
#define hipMemsetAsync cudaMemsetAsync
#define hipPointerGetAttributes cudaPointerGetAttributes
#define hipStreamCreateWithPriority cudaStreamCreateWithPriority
#define hipStreamIsCapturing cudaStreamIsCapturing
#define hipStreamSynchronize cudaStreamSynchronize
#define hipStreamWaitEvent cudaStreamWaitEvent
#define hipThreadExchangeStreamCaptureMode cudaThreadExchangeStreamCaptureMode
