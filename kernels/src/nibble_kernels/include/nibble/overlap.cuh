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

template <class... Parameters, class... Arguments>
cudaError_t launch_early(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, cudaStream_t stream,
                         void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes));
  return error == cudaSuccess ? cudaLaunchKernelEx(&config, kernel, arguments...) : error;
}

}  // namespace nibble
