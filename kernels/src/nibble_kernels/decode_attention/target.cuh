// The GPU that a launch is for, and which forms of a kernel its target has.
#pragma once

#include <cuda_runtime.h>

namespace nibble::attention {

inline constexpr int kMostDevices = 64;
// A block's shared memory on SM12x, and from where on the larger forms are taken.
inline constexpr int kSmallSharedBytes = 99 * 1024, kLargeSharedBytes = 128 * 1024;

// Targets with compute capability 12 have the small forms, others the large ones.
template <bool IsSmall>
__device__ constexpr bool is_for_target() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return IsSmall;
#else
  return !IsSmall;
#endif
}

struct Gpu {
  int multiprocessors, shared_bytes, capability;  // 90 for SM90
};

inline cudaError_t find_gpu(int device, Gpu& gpu) {
  cudaError_t error = cudaDeviceGetAttribute(&gpu.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&gpu.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  int major = 0, minor = 0;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  gpu.capability = major * 10 + minor;
  return error;
}

}  // namespace nibble::attention
