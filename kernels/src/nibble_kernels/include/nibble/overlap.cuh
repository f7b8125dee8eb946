// Launches that may begin while the kernel before them ends. Without torch.
#pragma once

#include <cuda_runtime.h>

#include "nibble/tensor_core.cuh"

namespace nibble {

// What such a kernel does first: it touches no memory before the kernels before it have ended.
__device__ __forceinline__ void wait_for_kernel_before() {
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
}

// The attributes belong to the configuration. Clusters of `ranks` blocks, or none.
inline cudaLaunchConfig_t early_config(cudaLaunchAttribute (&attributes)[2], uint32_t ranks, dim3 blocks,
                                       uint32_t threads, uint32_t shared_bytes, cudaStream_t stream) {
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = ranks > 1 ? 2 : 1;
  return config;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_clusters_early(uint32_t ranks, dim3 blocks, uint32_t threads, uint32_t shared_bytes,
                                  cudaStream_t stream, void (*kernel)(Parameters...),
                                  const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  const cudaLaunchConfig_t config = early_config(attributes, ranks, blocks, threads, shared_bytes, stream);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes));
  return error == cudaSuccess ? cudaLaunchKernelEx(&config, kernel, arguments...) : error;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_early(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, cudaStream_t stream,
                         void (*kernel)(Parameters...), const Arguments&... arguments) {
  return launch_clusters_early(1, blocks, threads, shared_bytes, stream, kernel, arguments...);
}

}  // namespace nibble
