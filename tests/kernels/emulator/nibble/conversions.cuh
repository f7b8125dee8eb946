// Conversions of a kernel on a host, in place of kernels/src/nibble_kernels/include/nibble/conversions.cuh: the
// portable ones of conversions.h.
#pragma once

#include "nibble/conversions.h"
#include "nibble/tensor_core.cuh"

namespace nibble {

struct Encoded8 {
  uint32_t codes;
};

inline float maximum(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return __uint_as_float(0x7fffffff);
  return std::max(a, b);
}

struct Software {
  static Encoded8 e2m1_encode8(const float (&x)[8], const uint4&, float, float factor) {
    uint32_t codes = 0;
    for (int i = 0; i < 8; ++i) codes |= e2m1_encode(x[i] * factor) << 4 * i;
    return {codes};
  }
  static uint32_t e4m3_encode(float x) { return nibble::e4m3_encode(x); }
  static float e4m3_decode(uint32_t code) { return nibble::e4m3_decode(code); }
};

using Instructions = Software;

}  // namespace nibble
