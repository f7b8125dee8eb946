// How a block of 16 elements becomes NVFP4 codes and a scale under a static global scale: two neighbouring
// threads have eight elements each. Without torch: quantize.cuh and the experts' W4A4 kernels use it, and the
// host in tests.
#pragma once

#include "nibble/conversions.cuh"
#include "nibble/exact.h"
#include "nibble/tensor_core.cuh"

namespace nibble {

constexpr uint32_t kVector = 8;  // elements a thread has at a time

struct Exact {
  static __device__ __forceinline__ float reciprocal(float x) { return __frcp_rn(x); }
  static __device__ __forceinline__ float reciprocal_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }
  static __device__ __forceinline__ float silu(float x) { return exact_silu(x); }
};

__device__ __forceinline__ float amax8(const float (&x)[8]) {
  const float low = maximum(maximum(fabsf(x[0]), fabsf(x[1])), maximum(fabsf(x[2]), fabsf(x[3])));
  const float high = maximum(maximum(fabsf(x[4]), fabsf(x[5])), maximum(fabsf(x[6]), fabsf(x[7])));
  return maximum(low, high);
}

// ---- sixteen bytes of bfloat16 or float16 as floats, and back

template <class T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

struct Quantized {
  uint32_t codes;
  uint32_t scale;
};

// A thread's half of a block.
struct Half {
  uint4 words;
  float x[8];
  float amax;  // the block's
};

template <class T>
__device__ __forceinline__ Half half_of(const uint4& words) {
  Half half{words};
  unpack<T>(words, half.x);
  const float mine = amax8(half.x);
  half.amax = maximum(mine, __shfl_xor_sync(0xffffffffu, mine, 1));
  return half;
}

// activation_quant/reference.py
template <class Convert, class Precision>
struct StaticScale {
  struct Parameters {
    const float* global_scale_inv;
  };

  float global_scale_inv, global_scale;

  __device__ __forceinline__ explicit StaticScale(float inverse)
      : global_scale_inv(inverse), global_scale(Precision::reciprocal(inverse)) {}
  __device__ __forceinline__ explicit StaticScale(const Parameters& parameters)
      : StaticScale(__ldg(parameters.global_scale_inv)) {}

  __device__ __forceinline__ Quantized operator()(const Half& half) const {
    const uint32_t scale = Convert::e4m3_encode(global_scale_inv * (half.amax * (1.0f / 6.0f)));
    const float value = Convert::e4m3_decode(scale);
    const float factor = value == 0.0f ? 0.0f : Precision::reciprocal(value * global_scale);
    return {Convert::e2m1_encode8(half.x, half.words, half.amax, factor).codes, scale};
  }
};

}  // namespace nibble
