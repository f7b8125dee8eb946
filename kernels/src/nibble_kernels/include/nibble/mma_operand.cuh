// Weights as operands of the tensor cores' m16n8k16: a code times its block scale, exact in both types.
//
// A policy decodes the eight codes of a word into four registers of two neighbours, and knows by what power
// of two its products are off (`kUnit`). weight.py says how codes lie in a word.
#pragma once

#include "nibble/tensor_core.cuh"

namespace nibble {

__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// Four scales of a word, each in both halves of a register.
__device__ __forceinline__ void broadcast_scales(uint32_t first, uint32_t second, uint32_t (&scales)[4]) {
  scales[0] = low_halves(first, first);
  scales[1] = high_halves(first, first);
  scales[2] = low_halves(second, second);
  scales[3] = high_halves(second, second);
}

// bfloat16, by integer operations: for targets without an instruction for E2M1. Scales must be positive
// (`prepare_weight` sees to it).
struct BfloatOperand {
  using Element = __nv_bfloat16;
  static constexpr float kUnit = 0x1p7f;
  static constexpr bool kAnyRange = true;  // activations keep their exponents

  // A code without its sign is 2^-126 of its value in a bfloat16's place, 0.5 as a subnormal number. Codes
  // lie so that eight operations bring a word's there: three pairs by turning the word, the last by a product
  // whose summands share no bit.
  static __device__ __forceinline__ void decode(uint32_t codes, uint32_t (&pairs)[4]) {
    constexpr uint32_t kPlaces = 0x81c081c0, kRest = 0x001b001b, kSpread = 1 << 3 | 1 << 8 | 1 << 14;
    const uint32_t turned = instruction::turn_left(codes, 6);
    pairs[0] = codes & kPlaces;
    pairs[1] = codes << 3 & kPlaces;
    pairs[2] = turned & kPlaces;
    pairs[3] = (turned & kRest) * kSpread & kPlaces;
  }

  // Times 2^119: f16 and bfloat16 differ by three mantissa bits and the bias of the exponent.
  static __device__ __forceinline__ void scales(uint32_t codes, uint32_t (&scales)[4]) {
    constexpr uint32_t kBias = 0x73807380;
    broadcast_scales((instruction::e4m3_pair(codes) >> 3) + kBias,
                     (instruction::e4m3_pair(codes >> 16) >> 3) + kBias, scales);
  }

  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    return instruction::multiply_bfloats(a, b);
  }

  static __device__ __forceinline__ float element(uint32_t pair, uint32_t i) {
    return __uint_as_float(pair >> 16 * i << 16);
  }

  static __device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
    instruction::mma_bfloats(sum, a0, a1, a2, a3, b0, b1);
  }
};

// An E4M3 weight as bfloat16, exact, with activations that keep their exponents.
struct E4m3Operand : BfloatOperand {
  static constexpr float kUnit = 1.0f;

  // Four codes: the first and the third become neighbours, and the others. A code without its sign is 2^-120
  // of its value in a bfloat16's place.
  static __device__ __forceinline__ void decode(uint32_t codes, uint32_t& first, uint32_t& second) {
    constexpr uint32_t kSigns = 0x80008000, kMagnitudes = 0x07f007f0, kBias = 0x7b807b80;
    first = multiply((codes << 8 & kSigns) | (codes << 4 & kMagnitudes), kBias);
    second = multiply((codes & kSigns) | (codes >> 4 & kMagnitudes), kBias);
  }
};

// float16, by the target's instruction where it has one. bfloat16 activations are first brought into
// float16's range, each row by its own power of two.
struct HalfOperand {
  using Element = __half;
  static constexpr bool kAnyRange = false;

  static __device__ __forceinline__ void scales(uint32_t codes, uint32_t (&scales)[4]) {
    broadcast_scales(instruction::e4m3_pair(codes), instruction::e4m3_pair(codes >> 16), scales);
  }

  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    return instruction::multiply_halves(a, b);
  }

  static __device__ __forceinline__ float element(uint32_t pair, uint32_t i) {
    return instruction::half_of(pair, i);
  }

  static __device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
    instruction::mma_halves(sum, a0, a1, a2, a3, b0, b1);
  }

#if NIBBLE_HAS_E2M1_INSTRUCTIONS
  static constexpr float kUnit = 1.0f;

  static __device__ __forceinline__ void decode(uint32_t codes, uint32_t (&pairs)[4]) {
    instruction::e2m1_decode8(codes, pairs);
  }
#else
  // By way of E4M3, in whose place a code is 2^-6 of its value: the even codes of a word at once, then the
  // odd.
  static constexpr float kUnit = 0x1p6f;

  static __device__ __forceinline__ void decode(uint32_t codes, uint32_t (&pairs)[4]) {
    constexpr uint32_t kSigns = 0x80808080, kMagnitudes = 0x1c1c1c1c;
    const uint32_t even = (codes << 4 & kSigns) | (codes << 2 & kMagnitudes);
    const uint32_t odd = (codes & kSigns) | (codes >> 2 & kMagnitudes);
    const uint32_t first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
    pairs[0] = instruction::e4m3_pair(first);
    pairs[1] = instruction::e4m3_pair(first >> 16);
    pairs[2] = instruction::e4m3_pair(second);
    pairs[3] = instruction::e4m3_pair(second >> 16);
  }
#endif
};

}  // namespace nibble
