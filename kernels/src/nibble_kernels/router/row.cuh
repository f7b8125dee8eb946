// Arithmetic on eight neighbouring columns of a token, in float32. Every kernel adds up in the same order.
#pragma once

#include "nibble/bfloats.cuh"
#include "router/problem.h"

namespace nibble::router {

__device__ __forceinline__ Eight sum_of(const uint4& a, const uint4& b) {
  Eight sum = floats_of(a);
  const Eight more = floats_of(b);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) sum.values[i] += more.values[i];
  return sum;
}

__device__ __forceinline__ float dot(const Eight& a, const Eight& b) {
  float pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    pairs[i] = a.values[2 * i] * b.values[2 * i] + a.values[2 * i + 1] * b.values[2 * i + 1];
  return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
}

__device__ __forceinline__ float factor_of(const Problem& p, float squares) {
  return rsqrtf(squares / static_cast<float>(p.columns) + p.epsilon);
}
__device__ __forceinline__ uint4 normal_of(const Problem& p, Eight x, float factor, const uint4& norm) {
  const Eight weight = floats_of(norm);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) x.values[i] = x.values[i] * factor * (weight.values[i] + p.norm_offset);
  return rounded(x);
}

// The shared expert's factor from its gate's sum, rounded as a linear layer and sigmoid in bfloat16 are.
__device__ __forceinline__ void write_shared_factor(const Problem& p, uint32_t token, float sum) {
  const float factor = 1.0f / (1.0f + expf(-rounded(sum)));
  p.shared_factors[token] = static_cast<uint16_t>(__float_as_uint(rounded(factor)) >> 16);
}

}  // namespace nibble::router
