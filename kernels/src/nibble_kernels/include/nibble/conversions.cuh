// The conversions of a GPU kernel: by the target's instructions or by software, as a template argument.
#pragma once

#include <cuda_fp16.h>

#include "conversions.h"

namespace nibble {

// Eight E2M1 codes, the first one lowest, and the magnitudes they stand for; the compiler drops what is not
// used.
struct Encoded8 {
  uint32_t codes;
  float magnitudes[8];
};

// The larger of two numbers, or NaN where either is.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ uint32_t select_bits(uint32_t where_set, uint32_t elsewhere, uint32_t mask) {
  return (where_set & mask) | (elsewhere & ~mask);
}

template <uint32_t Selector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a,
                                                  uint32_t b) {  // __byte_perm drops bit 3 of selectors
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(Selector));
  return result;
}

// The signs of eight two-byte numbers where E2M1 codes have theirs, in bits 4 i + 3; the other bits are
// anything.
__device__ __forceinline__ uint32_t signs_of(const uint4& words) {
  // With bit 3 in the selector, PRMT fills a byte with the sign of the one selected. Low halves first, then
  // high ones.
  const uint32_t first = permute_bytes<0xfbd9>(words.x, words.y),
                 second = permute_bytes<0xfbd9>(words.z, words.w);
  const uint32_t even = permute_bytes<0x5410>(first, second), odd = permute_bytes<0x7632>(first, second);
  return select_bits(even, odd, 0x0f0f0f0f);
}

struct Software {
  static __device__ __forceinline__ uint32_t e2m1_encode8(const float (&x)[8]) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= e2m1_encode(x[i]) << 4 * i;
    return codes;
  }

  // E2M1(x * factor), the products rounded to float32. `words` has x in two bytes each; amax is their largest
  // magnitude.
  static __device__ __forceinline__ Encoded8 e2m1_encode8(const float (&x)[8], const uint4& words, float amax,
                                                          float factor) {
    const float eighth = factor * 0.125f;
    // No product is NaN, and an eighth of each is the product with an eighth of the factor.
    const bool ordinary = amax + fabsf(factor) < INFINITY && eighth * 8.0f == fabsf(factor);
    Encoded8 result;
    if (ordinary) {
      result = encode_ordinary(x, words, eighth);
    } else {
      result.codes = encode_each(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], factor);
#pragma unroll
      for (int i = 0; i < 8; ++i) result.magnitudes[i] = e2m1_decode(result.codes >> 4 * i & 7);
    }
    return result;
  }

  static __device__ __forceinline__ uint32_t e4m3_encode(float x) { return nibble::e4m3_encode(x); }
  static __device__ __forceinline__ float e4m3_decode(uint32_t code) { return nibble::e4m3_decode(code); }

 private:
  // As conversions.h's e2m1_shifted_code in half the instructions: a multiplication that saturates leaves
  // products of at most 8, whose code is at most 8, and 8 is made 7 in all codes at once.
  static __device__ __forceinline__ Encoded8 encode_ordinary(const float (&x)[8], const uint4& words,
                                                             float eighth) {
    constexpr float kShift = 0x1p23f;
    constexpr uint32_t kOfShifts =
        0x4b000000u + 0xb0000000u;  // what 2^23 adds to the codes below, whatever they are
    Encoded8 result;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float scaled;
      asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(scaled) : "f"(fabsf(x[i])), "f"(eighth));
      const float below_2 = fmaf(scaled, 16.0f, kShift), below_4 = fmaf(scaled, 8.0f, kShift + 2.0f);
      const float above_4 = fmaf(scaled, 4.0f, kShift + 4.0f);
      // Positive floats are ordered as their bits, of which Hopper takes the smallest of three at once.
      const uint32_t shifted =
          __vimin3_u32(__float_as_uint(below_2), __float_as_uint(below_4), __float_as_uint(above_4));
      codes += shifted << 4 * i;
      // A code in a float's place: code 1 is subnormal in both formats.
      const uint32_t at_most_7 = min(shifted, __float_as_uint(kShift + 7.0f));
      result.magnitudes[i] = __uint_as_float(at_most_7 << 22) * 0x1p126f;
    }
    codes -= kOfShifts;
    codes -= codes >> 3 & 0x11111111;
    result.codes = select_bits(codes, signs_of(words), 0x77777777);
    return result;
  }

  // By value: an array would be in memory where it is not called, too.
  static __device__ __noinline__ uint32_t encode_each(float a, float b, float c, float d, float e, float f,
                                                      float g, float h, float factor) {
    return e2m1_encode8(
        {a * factor, b * factor, c * factor, d * factor, e * factor, f * factor, g * factor, h * factor});
  }
};

// Where the target lacks an instruction, the software stands in for it.
struct Instructions {
  static __device__ __forceinline__ uint32_t e2m1_encode8(const float (&x)[8]) {
#if NIBBLE_HAS_E2M1_INSTRUCTIONS
    return instruction::e2m1_encode8(x);
#else
    return Software::e2m1_encode8(x);
#endif
  }

  static __device__ __forceinline__ Encoded8 e2m1_encode8(const float (&x)[8], const uint4& words, float amax,
                                                          float factor) {
#if NIBBLE_HAS_E2M1_INSTRUCTIONS
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = x[i] * factor;
    Encoded8 result;
    result.codes = instruction::e2m1_encode8(scaled);
    uint32_t pairs[4];
    instruction::e2m1_decode8(result.codes & 0x77777777, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      result.magnitudes[2 * i] = pair.x;
      result.magnitudes[2 * i + 1] = pair.y;
    }
    return result;
#else
    return Software::e2m1_encode8(x, words, amax, factor);
#endif
  }

  static __device__ __forceinline__ uint32_t e4m3_encode(float x) {
#if NIBBLE_HAS_E4M3_INSTRUCTIONS
    return instruction::e4m3_encode(x);
#else
    return nibble::e4m3_encode(x);
#endif
  }

  static __device__ __forceinline__ float e4m3_decode(uint32_t code) {
#if NIBBLE_HAS_E4M3_INSTRUCTIONS
    return instruction::e4m3_decode(code);
#else
    return nibble::e4m3_decode(code);
#endif
  }
};

}  // namespace nibble
