// The norm in front of a router for many tokens, with the bits that gate.cuh gives: two warps have a token.
// Four neighbouring threads stand for a warp there, and have its columns.
#pragma once

#include "router/row.cuh"

namespace nibble::router {

// ChunksOfWarp: the most 32s of columns that a warp of gate.cuh has.
template <uint32_t ChunksOfWarp>
class Norm {
 public:
  static constexpr uint32_t kTokens = 4, kThreadsOfToken = kWarps * 4, kThreads = kTokens * kThreadsOfToken;
  struct Shared {
    float squares[kTokens][2], dots[kTokens][2];  // of both warps
  };

  __device__ __forceinline__ Norm(const Problem& problem, Shared& shared) : p_(problem), shared_(shared) {}

  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
    const uint32_t token = blockIdx.x * kTokens + number(), vectors = p_.columns / 8;
    const size_t row = size_t{token} * vectors;
    const bool is_token = token < p_.tokens;
    Eight x[ChunksOfWarp];
    float squares = 0, dots = 0;
#pragma unroll
    for (uint32_t i = 0; i < ChunksOfWarp; ++i) {
      if (!is_token || place(i) >= vectors) continue;
      x[i] = sum_of(p_.x[row + place(i)], p_.residual[row + place(i)]);
      p_.sum[row + place(i)] = rounded(x[i]);
      squares += dot(x[i], x[i]);
    }
    const float factor = factor_of(p_, sum_of_token(squares, shared_.squares[number()]));
#pragma unroll
    for (uint32_t i = 0; i < ChunksOfWarp; ++i) {
      if (!is_token || place(i) >= vectors) continue;
      const uint4 normal = normal_of(p_, x[i], factor, __ldg(p_.norm + place(i)));
      p_.normed[row + place(i)] = normal;
      if (p_.shared_gate) dots += dot(floats_of(normal), floats_of(__ldg(p_.shared_gate + place(i))));
    }
    if (!p_.shared_gate) return;
    const float sum = sum_of_token(dots, shared_.dots[number()]);
    if (is_token && threadIdx.x % kThreadsOfToken == 0) write_shared_factor(p_, token, sum);
  }

 private:
  __device__ __forceinline__ static uint32_t number() { return threadIdx.x / kThreadsOfToken; }
  // Of eight columns; a chunk is four of them, so all of a chunk are there or none.
  __device__ __forceinline__ static uint32_t place(uint32_t i) {
    return threadIdx.x % kThreadsOfToken + i * kThreadsOfToken;
  }

  // In every thread of the token. The order is that of gate.cuh: the columns of one of its warps, then the
  // warps as a tree.
  __device__ __forceinline__ static float sum_of_token(float own, float (&of_warps)[2]) {
#pragma unroll
    for (uint32_t by = 1; by < kLanes; by *= 2) own += __shfl_xor_sync(~0u, own, by);
    if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes % 2] = own;
    __syncthreads();
    return of_warps[0] + of_warps[1];
  }

  const Problem& p_;
  Shared& shared_;
};

}  // namespace nibble::router
