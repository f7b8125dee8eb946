// The launches of small.cuh, without torch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "fp8_linear/small.cuh"

namespace nibble::fp8 {

template <class T, uint32_t TokenGroups, bool Blockwise>
__global__ void __launch_bounds__(kThreads, TokenGroups == 1 ? 2 : 1)
    multiply(const __grid_constant__ Problem problem) {
  extern __shared__ float shared[];
  Multiplier<T, TokenGroups, Blockwise>{problem, shared}.run();
}

template <class T, bool Blockwise, uint32_t TokenGroups>
cudaError_t launch_some(const Problem& p, cudaStream_t stream) {
  constexpr uint32_t kBytes = Multiplier<T, TokenGroups, Blockwise>::kSharedBytes;
  multiply<T, TokenGroups, Blockwise><<<(p.outputs + kRows - 1) / kRows, kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

// 32 tokens at a time; each time the weight is read.
template <class T, bool Blockwise>
cudaError_t launch(Problem p, cudaStream_t stream) {
  p.chunks = (p.columns + kChunk - 1) / kChunk;
  const uint32_t all = p.tokens;
  for (uint32_t done = 0; done < all; done += p.tokens) {
    p.tokens = std::min(all - done, 32u);
    const cudaError_t error = p.tokens <= 8    ? launch_some<T, Blockwise, 1>(p, stream)
                              : p.tokens <= 16 ? launch_some<T, Blockwise, 2>(p, stream)
                                               : launch_some<T, Blockwise, 4>(p, stream);
    if (error != cudaSuccess) return error;
    p.x += size_t{p.tokens} * p.columns;
    p.out = static_cast<T*>(p.out) + size_t{p.tokens} * p.outputs;
    if (Blockwise || !p.x_has_one_scale) p.x_scale += size_t{p.tokens} * (Blockwise ? p.chunks : 1);
  }
  return cudaSuccess;
}

}  // namespace nibble::fp8
