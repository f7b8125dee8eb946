// What a decoder layer does to a row between its products, in BF16 as vLLM's modules round: loops that are
// compiled for each level of instructions.
#pragma once

#include "nibble/exact.h"
#include "nibble/nvfp4_product.h"

namespace nibble::cpu {

typedef torch::headeronly::BFloat16 BFloat16;

NIBBLE_FUNCTION float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.x) << 16); }

// To nearest, ties to even; NaN stays NaN.
NIBBLE_FUNCTION BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uint32_t nan = bits >> 16 | 0x40;
  BFloat16 result;
  result.x = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  return result;
}

NIBBLE_FUNCTION float rounded(float x) { return to_float(to_bfloat16(x)); }

constexpr int64_t kSumLanes = 64;  // a sum's order is the same at every level

// 1 / sqrt(mean of squares + epsilon)
NIBBLE_FUNCTION float inverse_rms(const float* x, int64_t count, float epsilon) {
  float lanes[kSumLanes] = {};
  int64_t at = 0;
  for (; at + kSumLanes <= count; at += kSumLanes)
    for (int64_t i = 0; i < kSumLanes; ++i) lanes[i] += x[at + i] * x[at + i];
  for (int64_t i = 0; at + i < count; ++i) lanes[i] += x[at + i] * x[at + i];
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return 1.0f / std::sqrt(lanes[0] / static_cast<float>(count) + epsilon);
}

NIBBLE_FUNCTION void scale_by(const float* x, int64_t count, float factor, const BFloat16* weight, BFloat16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(rounded(x[i] * factor) * to_float(weight[i]));
}

// residual += added, if there is any; the norm of the sum before it is rounded. `floats` holds a row.
NIBBLE_CPU_LEVELS inline void add_and_normalize(const BFloat16* added, BFloat16* residual, int64_t count,
                                                const BFloat16* weight, float epsilon, float* floats,
                                                BFloat16* to) {
  if (added) {
    for (int64_t i = 0; i < count; ++i) floats[i] = to_float(added[i]) + to_float(residual[i]);
    for (int64_t i = 0; i < count; ++i) residual[i] = to_bfloat16(floats[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) floats[i] = to_float(residual[i]);
  }
  scale_by(floats, count, inverse_rms(floats, count, epsilon), weight, to);
}

// One head in place: its norm, if it has a weight, and its rotation, the first half of the rotated columns
// against the second. cos_sin: those of the position, `half` each.
NIBBLE_CPU_LEVELS inline void normalize_and_rotate(BFloat16* x, int64_t size, const BFloat16* weight,
                                                   float epsilon, const BFloat16* cos_sin, int64_t half,
                                                   float* floats) {
  if (weight) {
    for (int64_t i = 0; i < size; ++i) floats[i] = to_float(x[i]);
    scale_by(floats, size, inverse_rms(floats, size, epsilon), weight, x);
  }
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]), second = to_float(x[half + i]);
    const float cos = to_float(cos_sin[i]), sin = to_float(cos_sin[half + i]);
    x[i] = to_bfloat16(first * cos - second * sin);
    x[half + i] = to_bfloat16(second * cos + first * sin);
  }
}

NIBBLE_CPU_LEVELS inline void finish_and_store(float* sums, int64_t count, Epilogue epilogue, BFloat16* to) {
  finish(sums, count, epilogue);
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(sums[i]);
}

// silu(gate) · up, each rounded.
NIBBLE_CPU_LEVELS inline void finish_silu_mul(float* gate, float* up, int64_t count, Epilogue of_gate,
                                              Epilogue of_up, BFloat16* to) {
  finish(gate, count, of_gate);
  finish(up, count, of_up);
  for (int64_t i = 0; i < count; ++i)
    to[i] = to_bfloat16(rounded(exact_silu(rounded(gate[i]))) * rounded(up[i]));
}

}  // namespace nibble::cpu
