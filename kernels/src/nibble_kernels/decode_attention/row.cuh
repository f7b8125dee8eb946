// A row of attention: a query head of a token. What all kernels do with a row's queries and result.
#pragma once

#include "decode_attention/problem.h"
#include "nibble/tensor_core.cuh"

namespace nibble::attention {

inline constexpr float kLog2E = 1.4426950408889634f;

// Where a row's query, and its result without strides, lies.
struct RowPlace {
  uint32_t token, head;
};
__device__ __forceinline__ size_t row_of(const Problem& p, const RowPlace& place) {
  return size_t{place.token} * (p.kv_heads * p.group) + place.head;
}

// Two numbers as float16 or bfloat16.
__device__ __forceinline__ uint32_t pair_of(float low, float high, bool is_half) {
  if (is_half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// For FP8 queries become float16 after a power of two that fits each row; what this rounds off is below 2^-25
// of the row's largest element. The result takes that back. `Lanes` neighbouring lanes have a row.
template <uint32_t Lanes, uint32_t Count>
__device__ __forceinline__ float fit_range(uint2 (&query)[Count]) {
  uint32_t largest = 0;  // bits of the largest magnitude
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) {
    const uint32_t x = query[i].x, y = query[i].y;
    largest = max(largest, max(max(x & 0x7fff, x >> 16 & 0x7fff), max(y & 0x7fff, y >> 16 & 0x7fff)));
  }
  if constexpr (Lanes == kLanes) {
    largest = __reduce_max_sync(~0u, largest);
  } else {
#pragma unroll
    for (uint32_t mask = 1; mask < Lanes; mask *= 2)
      largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
  }
  // 2^-e for a row whose largest element is in [2^e, 2^(e + 1)).
  const uint32_t exponent = max(min(largest >> 7, 252u), 2u);
  const float factor = __uint_as_float((254 - exponent) << 23);
  const auto fit = [&](uint32_t bits) {
    return pair_of(__uint_as_float(bits << 16) * factor, __uint_as_float(bits & 0xffff0000) * factor, true);
  };
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) {
    query[i].x = fit(query[i].x);
    query[i].y = fit(query[i].y);
  }
  return __uint_as_float(exponent << 23);
}

// What a row's sum of values is multiplied by, from the maximum of its scores in base 2 and its sum of
// weights. It also writes the log-sum-exp, where this thread shall.
__device__ __forceinline__ float finish_row(const Problem& p, const RowPlace& place, float maximum,
                                            float total, bool writes) {
  constexpr float kLn2 = 0.6931471805599453f;
  float factor = p.v_scale ? __ldg(p.v_scale) : 1;
  if (p.sinks != nullptr) {
    const float sink = __ldg(p.sinks + place.head) * kLog2E, top = fmaxf(maximum, sink);
    const float of_keys = instruction::power_of_two(maximum - top);
    total = fmaf(total, of_keys, instruction::power_of_two(sink - top));
    factor *= of_keys;
    maximum = top;
  }
  if (writes && p.lse != nullptr)
    p.lse[row_of(p, place)] = total > 0 ? (maximum + log2f(total)) * kLn2 : -INFINITY;
  return total == 0 ? 0 : factor / total;
}

}  // namespace nibble::attention
