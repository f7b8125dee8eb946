// nvfp4_matmul.h with the products of AVX-VNNI, in registers of AVX2. With NIBBLE_AVX_VNNI_BY_AVX512 the same
// products have the encoding of AVX-512, for tests on processors that have only that.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_X86_LEVELS
#include <immintrin.h>

#include <cstring>

#ifdef NIBBLE_AVX_VNNI_BY_AVX512
#pragma GCC target("avx2,fma,f16c,avx512vl,avx512vnni")
#define NIBBLE_DPBUSD _mm256_dpbusd_epi32
#define NIBBLE_DPWSSD _mm256_dpwssd_epi32
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define NIBBLE_DPBUSD _mm256_dpbusd_avx_epi32
#define NIBBLE_DPWSSD _mm256_dpwssd_avx_epi32
#endif

namespace nibble::cpu {
namespace {

#include "nibble/nvfp4_lanes_avx2.h"

constexpr int kFewOfBytes = 8, kTilesOfBytes = 1, kRowsOfBytes = 4;
constexpr int64_t kDepthOfBytes = 128;

inline Bytes start_of_sums(const QuantizedRows& x, int64_t at) {
  const __m256i offset = _mm256_set1_epi32(x.offsets[at]);
  return {offset, offset};
}

inline Bytes multiply_bytes(Bytes sums, Bytes w, const int8_t* x) {
  const __m256i each = broadcast_four(x);
  return {in_order(NIBBLE_DPBUSD(sums.low, w.low, each)), in_order(NIBBLE_DPBUSD(sums.high, w.high, each))};
}

// The product of the scales is exact, and so is its product with a sum. It needs no sum, so it waits for none.
inline void add_scaled(Bytes sums, const Lanes& scale, const QuantizedRows& x, int64_t at, Lanes& total) {
  total = fma({_mm256_cvtepi32_ps(sums.low), _mm256_cvtepi32_ps(sums.high)}, scale * broadcast(x.scales[at]), total);
}

#include "nibble/nvfp4_row_groups.h"
#include "nibble/nvfp4_matmul_bytes.h"

constexpr int kFewOfWords = 4, kRowsOfWords = 6;

// At most 16 · 12 · 2^8 · 2^15 in 32 bits.
inline Sums multiply_pairs(Sums sums, Pairs w, const int16_t* x) {
  const __m256i both = broadcast_four(x);
  return {in_order(NIBBLE_DPWSSD(sums.low, w.low, both)), in_order(NIBBLE_DPWSSD(sums.high, w.high, both))};
}

inline Bytes first_bytes(Bytes w, const int8_t* x) {
  return multiply_bytes({_mm256_setzero_si256(), _mm256_setzero_si256()}, w, x);
}

inline Sums combined(Bytes high, Bytes low) {
  return {_mm256_add_epi32(_mm256_slli_epi32(high.low, 8), low.low),
          _mm256_add_epi32(_mm256_slli_epi32(high.high, 8), low.high)};
}

#include "nibble/nvfp4_one_word_row.h"

// x's scales are powers of two, so they are added to the exponents of the weight's. That leaves the two pipes of
// products to products. Weights are zero where their scale is, which has no exponent to add to.
struct ScalesAsExponents {
  static __m256i kept(__m256i w, __m256 scale) {
    return _mm256_and_si256(w, _mm256_castps_si256(_mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_NEQ_OQ)));
  }
  static __m256 stored(__m256 scale) {
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_blendv_ps(scale, one, _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_EQ_OQ));
  }
  static __m256 times(__m256 scale, int32_t exponent) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(scale), _mm256_set1_epi32(exponent)));
  }

  static Pairs kept(Pairs w, Lanes scale) { return {kept(w.low, scale.low), kept(w.high, scale.high)}; }
  static Lanes stored(Lanes scale) { return {stored(scale.low), stored(scale.high)}; }
  static Lanes add(Lanes total, Sums block, Lanes scale, float x_scale) {
    int32_t exponent;
    std::memcpy(&exponent, &x_scale, sizeof exponent);
    exponent -= 127 << 23;
    return fma(floats_of(block), {times(scale.low, exponent), times(scale.high, exponent)}, total);
  }
};

void many_words_or_tiny(const Tiles& tiles, int64_t tile_count, const WordRows& x, int64_t count, void* panel,
                        float* sums, int64_t stride) {
  bool has_tiny = false;
  for (int64_t row = 0; row < count; ++row) has_tiny |= x.has_tiny[row] != 0;
  (has_tiny ? many_words<ScalesAsNumbers> : many_words<ScalesAsExponents>)(tiles, tile_count, x, count, panel, sums,
                                                                           stride);
}

}  // namespace

extern const WordLoops kAvxVnniWords = loops_with_digits(many_words_or_tiny);
extern const ByteLoops kAvxVnniBytes = kByteLoops;

}  // namespace nibble::cpu
#endif
