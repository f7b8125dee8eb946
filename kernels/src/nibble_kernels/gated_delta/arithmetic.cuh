// Numbers of the gated delta rule's kernels.
#pragma once

#include "gated_delta/problem.h"
#include "nibble/bfloats.cuh"

namespace nibble::gated_delta {

// Within a few times 2^-23, as Triton's kernels compute them.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x <= 20.0f ? __logf(1.0f + __expf(x)) : x; }

// 16 bytes of a row of the state, four numbers at a time.
struct Floats {
  static constexpr uint32_t kEach = 4;
  __device__ __forceinline__ static float4 unpack(const uint4& unit, uint32_t) {
    return make_float4(__uint_as_float(unit.x), __uint_as_float(unit.y), __uint_as_float(unit.z),
                       __uint_as_float(unit.w));
  }
  __device__ __forceinline__ static void pack(uint4& unit, uint32_t, const float4& x) {
    unit = make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
  }
};
struct Bfloats {
  static constexpr uint32_t kEach = 8;
  __device__ __forceinline__ static float4 unpack(const uint4& unit, uint32_t half) {
    const uint32_t a = half == 0 ? unit.x : unit.z, b = half == 0 ? unit.y : unit.w;
    return make_float4(low(a), high(a), low(b), high(b));
  }
  __device__ __forceinline__ static void pack(uint4& unit, uint32_t half, const float4& x) {
    (half == 0 ? unit.x : unit.z) = pair_of(x.x, x.y);
    (half == 0 ? unit.y : unit.w) = pair_of(x.z, x.w);
  }
};

__device__ __forceinline__ void add_dot(float& sum, const float4& a, const float4& b) {
  sum = __builtin_fmaf(a.x, b.x, sum);
  sum = __builtin_fmaf(a.y, b.y, sum);
  sum = __builtin_fmaf(a.z, b.z, sum);
  sum = __builtin_fmaf(a.w, b.w, sum);
}
// In all lanes of a group of neighbours.
template <uint32_t Lanes>
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (uint32_t by = Lanes / 2; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
  return sum;
}

// How a token changes the state S of a head: S' = decay S + u k', with u = beta (v - decay S k). The output is
// S' q, which is decay S q + u (k q).
struct Gates {
  float decay, beta;
};
// b and a: the gates' product, rounded as a linear layer rounds it.
__device__ __forceinline__ Gates gates_of(float b, float a, float a_log, float dt_bias) {
  return {__expf(-__expf(a_log) * softplus(a + dt_bias)), sigmoid(b)};
}
__device__ __forceinline__ float norm_factor(float squares) { return rsqrtf(squares + 1e-6f); }
inline constexpr float kQueryScale = 0.08838834764831845f;  // 128^-0.5
__device__ __forceinline__ float output_gate(const Problem& p, float z) {
  return p.is_sigmoid ? sigmoid(z) : z * sigmoid(z);
}

}  // namespace nibble::gated_delta
