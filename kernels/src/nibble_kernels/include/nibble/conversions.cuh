// The conversions of a GPU kernel: by the target's instructions or by software, as a template argument.
#pragma once

#include "conversions.h"

namespace nibble {

// Eight E2M1 codes, x[0]'s lowest, and the magnitudes they stand for; the compiler drops what is not used.
struct Encoded8 {
  uint32_t codes;
  float magnitudes[8];
};

struct Software {
  static __device__ __forceinline__ Encoded8 e2m1_encode8(const float (&x)[8], bool may_be_nan) {
    Encoded8 result;
    uint32_t shifted[8], codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) shifted[i] = __float_as_uint(e2m1_shifted_code(fabsf(x[i])));
    // Sums of what is shifted left by 4 i: the bits of 2^23 in them are the same whatever the codes are.
#pragma unroll
    for (int i = 0; i < 8; ++i) codes += shifted[i] << 4 * i;
    constexpr uint32_t kOfShifts = 0x4b000000u + 0xb0000000u;
    result.codes = select_bits(codes - kOfShifts, signs(x), 0x77777777);
    if (may_be_nan) {  // the smaller of 7 and NaN is 7: only its sign is left to clear
#pragma unroll
      for (int i = 0; i < 8; ++i) result.codes &= isnan(x[i]) ? ~(8u << 4 * i) : ~0u;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // a code in a float's place: code 1 is subnormal in both formats
      result.magnitudes[i] = __uint_as_float(shifted[i] << 22) * 0x1p126f;
    }
    return result;
  }

  static __device__ __forceinline__ uint32_t e4m3_encode(float x) { return nibble::e4m3_encode(x); }
  static __device__ __forceinline__ float e4m3_decode(uint32_t code) { return nibble::e4m3_decode(code); }

 private:
  // The sign of x[i] in bit 4 i + 3; other bits are anything.
  static __device__ __forceinline__ uint32_t signs(const float (&x)[8]) {
    // PRMT with a selector from 8 on copies a byte's sign into its eight bits.
    const auto of_four = [](float a, float b, float c, float d) {
      const uint32_t low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x00fb);
      const uint32_t high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x00fb);
      return __byte_perm(low, high, 0x5410);
    };
    return select_bits(of_four(x[0], x[2], x[4], x[6]), of_four(x[1], x[3], x[5], x[7]), 0x0f0f0f0f);
  }

  static __device__ __forceinline__ uint32_t select_bits(uint32_t where_set, uint32_t elsewhere, uint32_t mask) {
    return (where_set & mask) | (elsewhere & ~mask);
  }
};

// Where the target lacks an instruction, the software stands in for it.
struct Instructions {
  static __device__ __forceinline__ Encoded8 e2m1_encode8(const float (&x)[8], bool may_be_nan) {
#if NIBBLE_HAS_E2M1_INSTRUCTIONS
    Encoded8 result;
    result.codes = instruction::e2m1_encode8(x);
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
    return Software::e2m1_encode8(x, may_be_nan);
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
