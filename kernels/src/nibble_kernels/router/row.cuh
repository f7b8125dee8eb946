// Arithmetic on eight neighbouring columns of a token, in float32. Every kernel adds up in the same order.
#pragma once

#include "nibble/tensor_core.cuh"
#include "router/problem.h"

namespace nibble::router {

struct Eight {
  float values[8];
};

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ __forceinline__ Eight floats_of(const uint4& eight) {
  return {{low(eight.x), high(eight.x), low(eight.y), high(eight.y), low(eight.z), high(eight.z),
           low(eight.w), high(eight.w)}};
}

__device__ __forceinline__ uint32_t pair_of(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint4 rounded(const Eight& x) {
  const float(&v)[8] = x.values;
  return make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]), pair_of(v[6], v[7]));
}
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

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
