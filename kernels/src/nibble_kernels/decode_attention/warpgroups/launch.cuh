// Launches of decode.cuh's kernel.
#pragma once

#include <cuda_runtime.h>

#include "decode_attention/cache_map.h"
#include "decode_attention/target.cuh"
#include "decode_attention/warpgroups/decode.cuh"

namespace nibble::attention::warpgroups {

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ CUtensorMap map) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(1024) uint8_t memory[];
  run<Form>(problem, map, *reinterpret_cast<Shared<Form>*>(memory));
#endif
}

// A launch that may begin while the kernel before it ends.
template <class Form>
cudaError_t launch_form(const Problem& p, int device, const CacheMap& cache, cudaStream_t stream) {
  static_assert(sizeof(Shared<Form>) <= Form::kSharedBytes);
  Gpu gpu;
  cudaError_t error = find_gpu(device, gpu);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(attend<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(sizeof(Shared<Form>)));
  if (error != cudaSuccess) return error;
  const uint64_t units = uint64_t{p.sequences} * p.kv_heads * row_tiles_of(p) * p.most_splits;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(std::min<uint64_t>(units, gpu.multiprocessors)));
  config.blockDim = dim3(Form::kThreads);
  config.dynamicSmemBytes = sizeof(Shared<Form>);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, attend<Form>, p, cache.of_tokens(Form::kPieceTokens, Form::kChunks));
}

template <uint32_t HeadDim, bool IsFp8>
cudaError_t launch_size(const Problem& p, const CacheMap& cache, int device, cudaStream_t stream) {
  if (slot_rows(p) > 8) return launch_form<Form<HeadDim, IsFp8, 2>>(p, device, cache, stream);
  return launch_form<Form<HeadDim, IsFp8, 1>>(p, device, cache, stream);
}

template <bool IsFp8>
cudaError_t launch_type(const Problem& p, const CacheMap& cache, uint32_t head_dim, int device,
                        cudaStream_t stream) {
  if (p.sequences == 0) return cudaSuccess;
  if (head_dim == 128) return launch_size<128, IsFp8>(p, cache, device, stream);
  return launch_size<256, IsFp8>(p, cache, device, stream);
}

}  // namespace nibble::attention::warpgroups
