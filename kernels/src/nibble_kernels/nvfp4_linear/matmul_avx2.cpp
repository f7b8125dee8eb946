// nvfp4_matmul.h with AVX2 and FMA.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_X86_LEVELS
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx2,fma,f16c")

namespace nibble::cpu {
namespace {

#include "nibble/nvfp4_lanes_avx2.h"

typedef float X;
constexpr Operand kOperand = Operand::kFloat;
constexpr float kFactor = 0x1p-32f;
constexpr int kStepColumns = 1;
constexpr int kFewAtOnce = 4, kTilesAtOnce = 1, kRowsAtOnce = 6;
constexpr int64_t kDepth = 32;

struct Decoded {
  const uint8_t* codes;
  explicit Decoded(const uint8_t* codes) : codes(codes) {}
};

// One byte of each lane, doubled values, as the highest byte of an integer: 2^25 · value.
template <int kByte>
inline __m256 byte_of(__m256i doubled) {
  if constexpr (kByte == 0) return _mm256_cvtepi32_ps(_mm256_slli_epi32(doubled, 24));
  if constexpr (kByte == 3)
    return _mm256_cvtepi32_ps(_mm256_and_si256(doubled, _mm256_set1_epi32(static_cast<int>(0xff000000))));
  const __m256i highest = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(-1, -1, -1, kByte, -1, -1, -1, kByte + 4, -1, -1, -1, kByte + 8, -1, -1, -1, kByte + 12));
  return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(doubled, highest));
}

template <int kColumn>
inline Lanes weights(const Decoded& decoded) {
  constexpr int place = kColumn % 8 / 2 + kColumn % 2 * 4;
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const uint8_t* half = decoded.codes + kColumn / 8 * 64;
  return {byte_of<place / 2>(look_up(doubled, codes_at(half), place % 2)),
          byte_of<place / 2>(look_up(doubled, codes_at(half + 32), place % 2))};
}

inline void store_scaled(Lanes w, Lanes scale, char* to) { store(reinterpret_cast<float*>(to), w * scale); }
inline Lanes panel_weights(const char* from) { return load(reinterpret_cast<const float*>(from)); }
inline Lanes multiply(Lanes sums, Lanes w, const float* x) { return fma(w, broadcast(*x), sums); }

#include "nibble/nvfp4_matmul_floats.h"

constexpr int kFewOfBytes = 8, kTilesOfBytes = 1, kRowsOfBytes = 4;
constexpr int64_t kDepthOfBytes = 128;

inline Bytes start_of_sums(const QuantizedRows&, int64_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

// At most 24 · 12 · 8 in sixteen bits: no sum saturates.
inline Bytes multiply_bytes(Bytes sums, Bytes w, const int8_t* x) {
  const __m256i each = broadcast_four(x);
  return {in_order(_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(w.low, each))),
          in_order(_mm256_add_epi16(sums.high, _mm256_maddubs_epi16(w.high, each)))};
}

// Dot products times x's scale, as ScaledOffset says: a product of words, which adds their pairs, replaces a
// conversion and a product of floats.
inline void add_scaled(Bytes sums, const Lanes& scale, const QuantizedRows& x, int64_t at, Lanes& total) {
  const ScaledOffset& offset = x.scaled_offsets[at];
  const __m256i multiplier = _mm256_set1_epi32(offset.multiplier), start = _mm256_set1_epi32(offset.start);
  const __m256 base = _mm256_set1_ps(offset.base);
  const Lanes scaled = {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_madd_epi16(sums.low, multiplier), start)) - base,
                        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_madd_epi16(sums.high, multiplier), start)) - base};
  total = fma(scaled, scale, total);
}

#include "nibble/nvfp4_row_groups.h"
#include "nibble/nvfp4_matmul_bytes.h"

constexpr int kFewOfWords = 4, kRowsOfWords = 4;

// At most 16 · 12 · 2^8 · 2^15 in 32 bits.
inline Sums multiply_pairs(Sums sums, Pairs w, const int16_t* x) {
  const __m256i both = broadcast_four(x);
  return {in_order(_mm256_add_epi32(sums.low, _mm256_madd_epi16(w.low, both))),
          in_order(_mm256_add_epi32(sums.high, _mm256_madd_epi16(w.high, both)))};
}

inline Bytes first_bytes(Bytes w, const int8_t* x) {
  const __m256i each = broadcast_four(x);
  return {in_order(_mm256_maddubs_epi16(w.low, each)), in_order(_mm256_maddubs_epi16(w.high, each))};
}

// At most 24 · 128 · 8 in each half of a lane.
inline Sums combined(Bytes high, Bytes low) {
  const __m256i unit = _mm256_set1_epi16(1), upper = _mm256_set1_epi16(256);
  return {_mm256_add_epi32(_mm256_madd_epi16(high.low, upper), _mm256_madd_epi16(low.low, unit)),
          _mm256_add_epi32(_mm256_madd_epi16(high.high, upper), _mm256_madd_epi16(low.high, unit))};
}

#include "nibble/nvfp4_one_word_row.h"

}  // namespace

extern const WordLoops kAvx2Words = loops_with_digits(kWordLoops.many);
extern const FloatLoops kAvx2Floats = kFloatLoops;
extern const ByteLoops kAvx2Bytes = kByteLoops;

}  // namespace nibble::cpu
#endif
