// nvfp4_matmul.h with AVX2 and FMA.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"
#include "nibble/e4m3_values.h"

#if NIBBLE_HAS_X86_LEVELS
#include <immintrin.h>

#pragma GCC target("avx2,fma")

namespace nibble::cpu {
namespace {

constexpr int kLanes = 8;
typedef __m256 Vec;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline float sum(Vec v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// The scales of one block in the low four lanes and of another in the high ones.
inline Vec two_scales(uint8_t low, uint8_t high) {
  return _mm256_blend_ps(_mm256_broadcast_ss(kE4m3Values + low), _mm256_broadcast_ss(kE4m3Values + high),
                         0xf0);
}

// Codes become bfloat16, high and low byte by a table each; a bfloat16 is the upper half of a float.
inline void decode(const uint8_t* codes, const uint8_t* scales, Vec (&w)[kChunk / kLanes]) {
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
  const __m256i low_bytes = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
  const __m256i nibble = _mm256_set1_epi8(15), upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const Vec even_blocks = two_scales(scales[0], scales[2]), odd_blocks = two_scales(scales[1], scales[3]);
  for (int odd = 0; odd < 2; ++odd) {
    const __m256i index = _mm256_and_si256(odd ? _mm256_srli_epi16(bytes, 4) : bytes, nibble);
    const __m256i high = _mm256_shuffle_epi8(high_bytes, index), low = _mm256_shuffle_epi8(low_bytes, index);
    const __m256i blocks02 = _mm256_unpacklo_epi8(low, high), blocks13 = _mm256_unpackhi_epi8(low, high);
    Vec* to = w + odd * 4;
    to[0] = _mm256_castsi256_ps(_mm256_slli_epi32(blocks02, 16)) * even_blocks;
    to[1] = _mm256_castsi256_ps(_mm256_and_si256(blocks02, upper_half)) * even_blocks;
    to[2] = _mm256_castsi256_ps(_mm256_slli_epi32(blocks13, 16)) * odd_blocks;
    to[3] = _mm256_castsi256_ps(_mm256_and_si256(blocks13, upper_half)) * odd_blocks;
  }
}

#include "nibble/nvfp4_matmul_kernels.h"

// Lane l of vector v: odd columns from the fifth vector on, every other pair of columns in every other
// vector, four of each of two blocks.
constexpr auto kOrder = [] {
  struct {
    uint8_t column[kChunk];
  } order{};
  for (int v = 0; v < kChunk / kLanes; ++v) {
    for (int l = 0; l < kLanes; ++l) {
      const int block = l / 4 * 2 + v % 4 / 2, byte = l % 4 * 2 + v % 2;
      order.column[v * kLanes + l] = static_cast<uint8_t>(block * 16 + byte * 2 + v / 4);
    }
  }
  return order;
}();

}  // namespace

extern const MatmulLevel kAvx2Level = {1, kPanel, kOrder.column, few, many};

}  // namespace nibble::cpu
#endif
