// bfloat16 numbers in pairs, the first in the lower half of a word, and eight of them in 16 bytes.
#pragma once

#include "nibble/tensor_core.cuh"

namespace nibble {

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ __forceinline__ uint32_t pair_of(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float rounded(float x) { return low(pair_of(x, 0)); }

struct Eight {
  float values[8];
};

__device__ __forceinline__ Eight floats_of(const uint4& eight) {
  return {{low(eight.x), high(eight.x), low(eight.y), high(eight.y), low(eight.z), high(eight.z),
           low(eight.w), high(eight.w)}};
}
__device__ __forceinline__ uint4 rounded(const Eight& x) {
  const float(&v)[8] = x.values;
  return make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]), pair_of(v[6], v[7]));
}

}  // namespace nibble
