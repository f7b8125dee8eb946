// Arithmetic that is the same on every device, bit for bit: the twin of exact.py.
#pragma once

#include "arch.h"

namespace nibble {

// exp(x), infinity from 88 and below -87 as there: 2^n times a polynomial of the rest.
NIBBLE_FUNCTION float exact_exp(float x) {
  const bool too_large = x > 88.0f;
  x = x < -87.0f ? -87.0f : too_large ? 88.0f : x;
  constexpr float kRound = 0x1.8p23f;
  const float n = __builtin_fmaf(x, 0x1.715476p+0f, kRound) - kRound;  // log2(e)
  float r = __builtin_fmaf(n, -0x1.62e4p-1f, x);  // ln(2) in two parts, n times the first is exact
  r = __builtin_fmaf(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.a01a02p-13f;  // 1/7!, 1/6!, …
  p = __builtin_fmaf(p, r, 0x1.6c16c2p-10f);
  p = __builtin_fmaf(p, r, 0x1.111112p-7f);
  p = __builtin_fmaf(p, r, 0x1.555556p-5f);
  p = __builtin_fmaf(p, r, 0x1.555556p-3f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  const float result = p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return too_large ? std::bit_cast<float>(0x7f800000) : result;
}

NIBBLE_FUNCTION float exact_silu(float x) { return x / (1.0f + exact_exp(-x)); }

}  // namespace nibble
