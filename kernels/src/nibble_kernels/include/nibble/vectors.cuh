// Sixteen bytes of bfloat16 or float16 elements, for kernels that take them one by one.
#pragma once

#include "nibble/tensor_core.cuh"

namespace nibble {

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

template <class T>
union Vector {
  uint4 words;
  T elements[8];
};

}  // namespace nibble
