// The launches of decode.cuh, without torch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "nvfp4_sparse/decode.cuh"

namespace nibble::sparse {

template <class Operand, uint32_t TokenGroups>
__global__ void __launch_bounds__(kThreads, 2) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  Multiplier<Operand, TokenGroups>{problem, shared}.run();
}

template <class Operand, uint32_t TokenGroups>
cudaError_t launch_some(const Problem& p, cudaStream_t stream) {
  constexpr uint32_t kBytes = Multiplier<Operand, TokenGroups>::kSharedBytes;
  static_assert(kBytes <= 48 * 1024);
  multiply<Operand, TokenGroups>
      <<<(p.outputs / 2 + kGroup - 1) / kGroup, kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

// 16 tokens at a time; each time the weight is read.
template <class Operand>
cudaError_t launch(Problem p, cudaStream_t stream) {
  using T = typename Operand::Element;
  const uint32_t all = p.tokens;
  for (uint32_t done = 0; done < all; done += p.tokens) {
    p.tokens = std::min(all - done, 16u);
    const cudaError_t error =
        p.tokens <= 8 ? launch_some<Operand, 1>(p, stream) : launch_some<Operand, 2>(p, stream);
    if (error != cudaSuccess) return error;
    p.x += size_t{p.tokens} * p.columns / 2;
    p.out = static_cast<T*>(p.out) + size_t{p.tokens} * (p.silu_mul ? p.outputs / 2 : p.outputs);
  }
  return cudaSuccess;
}

}  // namespace nibble::sparse
