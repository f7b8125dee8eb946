// E2M1 and E4M3 with the semantics of PTX's cvt.rn.satfinite: ties to even, saturation, signed zeros, NaN to
// +6 and 0x7F. Software for every target, and a choice between it and the target's instructions that kernels
// take as a template argument.
#pragma once

#include "arch.h"

namespace nibble {

constexpr uint32_t kFloatInfinity = 0x7f800000;

// The E2M1 code of a float: integers only.
NIBBLE_FUNCTION uint32_t e2m1_encode(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 28 & 8;
  if (magnitude > kFloatInfinity) return 7;
  if (magnitude >= 0x3f800000) {  // from 1: the exponent and one bit of the significand, less those of code 0
    const uint32_t rounded = magnitude + 0x1fffff + (magnitude >> 22 & 1);
    const uint32_t code = (rounded >> 22) - (0x3f000000 >> 22);
    return sign | (code < 7 ? code : 7);
  }
  return sign | ((magnitude > 0x3e800000) + (magnitude >= 0x3f400000));  // 0.25 goes to 0, 0.75 to 1
}

NIBBLE_FUNCTION float e2m1_decode(uint32_t code) {
  const uint32_t index = code & 7, sign = (code & 8) << 28;
  const uint32_t bits = index < 2 ? index * 0x3f000000 : 0x3f000000 + (index << 22);
  return std::bit_cast<float>(sign | bits);
}

// 2^23 + the E2M1 code of a magnitude, exact for every magnitude that is not NaN.
// Codes lie on three lines, 2m, m + 2 and m/2 + 4, each the lowest where it holds; adding 2^23 rounds each
// once, ties to even.
NIBBLE_FUNCTION float e2m1_shifted_code(float magnitude) {
  constexpr float kShift = 0x1p23f;
  const float below_2 = __builtin_fmaf(magnitude, 2.0f, kShift);
  const float below_4 = magnitude + (kShift + 2.0f);
  const float above_4 = __builtin_fmaf(magnitude, 0.5f, kShift + 4.0f);
  return minimum(minimum(below_2, below_4), minimum(above_4, kShift + 7.0f));
}

NIBBLE_FUNCTION uint32_t e4m3_encode(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 24 & 0x80;
  if (magnitude > kFloatInfinity) return 0x7f;
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // from 448
  if (magnitude >= 0x3c800000) {  // from 2^-6: the exponent and three bits of the significand
    const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    return sign | ((rounded >> 20) - (0x3c000000 >> 20));
  }
  return sign |
         (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xf);  // multiples of 2^-9
}

NIBBLE_FUNCTION constexpr float e4m3_decode(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 24, magnitude = code & 0x7f;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000);
  if (magnitude < 8)
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9f));
  return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000));
}

}  // namespace nibble
