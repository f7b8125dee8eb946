// nvfp4_matmul.h with AVX2 and FMA.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_X86_LEVELS
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx2,fma,f16c")

namespace nibble::cpu {
namespace {

struct Lanes {
  __m256 low, high;
};

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Lanes broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {a.low * b.low, a.high * b.high}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// An E4M3 number is a float16 with other exponents: its bits moved by 7, the sign by 8, are 2^-8 of it.
inline Lanes scales_of(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(moved)), _mm256_cvtph_ps(_mm256_extracti128_si256(moved, 1))};
}

inline __m256i codes_at(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// 16 values of bytes, by the low or the high nibbles.
inline __m256i look_up(__m128i values, __m256i pairs, bool high) {
  const __m256i index = _mm256_and_si256(high ? _mm256_srli_epi16(pairs, 4) : pairs, _mm256_set1_epi8(15));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), index);
}

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

struct Bytes {
  __m256i low, high;
};
constexpr int kFewOfBytes = 4, kTilesOfBytes = 1, kRowsOfBytes = 4;
constexpr int64_t kDepthOfBytes = 64;

template <int i>
inline Bytes bytes_of(const uint8_t* codes) {
  const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const uint8_t* half = codes + i / 2 * 64;
  return {look_up(values, codes_at(half), i % 2), look_up(values, codes_at(half + 32), i % 2)};
}

inline void store_bytes(char* to, Bytes w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), w.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), w.high);
}
inline Bytes load_bytes(const char* from) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32))};
}

// Keeps the order of additions: gcc would add all products of a block at its end, from memory.
inline __m256i in_order(__m256i sums) {
  asm("" : "+x"(sums));
  return sums;
}

// At most 24 · 12 · 8 in sixteen bits: no sum saturates.
inline Bytes multiply_bytes(Bytes sums, Bytes w, const int8_t* x) {
  int four;
  std::memcpy(&four, x, sizeof four);
  const __m256i each = _mm256_set1_epi32(four);
  return {in_order(_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(w.low, each))),
          in_order(_mm256_add_epi16(sums.high, _mm256_maddubs_epi16(w.high, each)))};
}

// Dot products times x's scale, as ScaledOffset says: a product of words, which adds their pairs, replaces a
// conversion and a product of floats.
inline Lanes scaled(Bytes sums, const ScaledOffset& offset) {
  const __m256i multiplier = _mm256_set1_epi32(offset.multiplier), start = _mm256_set1_epi32(offset.start);
  const __m256 base = _mm256_set1_ps(offset.base);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_madd_epi16(sums.low, multiplier), start)) - base,
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_madd_epi16(sums.high, multiplier), start)) - base};
}

// Weights are loaded, or decoded, once for all rows: sixteen registers do not hold a block of them.
template <int kRows, class Weights>
inline void add_block_of_bytes(const Weights& weights, const Lanes (&scale)[1], const QuantizedRows& x, int64_t block,
                               int64_t blocks, Lanes (&total)[kRows][1]) {
  const auto at = [&](int r) { return r * blocks + block; };
  Bytes sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for_each_of<4>([&](auto i) {
    const Bytes w = weights(0, i);
    for (int r = 0; r < kRows; ++r) sums[r] = multiply_bytes(sums[r], w, x.values + at(r) * kBlockColumns + 4 * i);
  });
  for (int r = 0; r < kRows; ++r)
    total[r][0] = fma(scaled(sums[r], x.scaled_offsets[at(r)]), scale[0], total[r][0]);
}

#include "nibble/nvfp4_matmul_bytes.h"

struct Pairs {
  __m256i low, high;
};
typedef Pairs Quarter;
typedef Pairs Sums;
constexpr int kFewOfWords = 4, kRowsOfWords = 4;

template <int kQuarter>
inline Quarter quarter_of(const uint8_t* codes) {
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const uint8_t* half = codes + kQuarter / 2 * 64;
  return {look_up(doubled, codes_at(half), kQuarter % 2), look_up(doubled, codes_at(half + 32), kQuarter % 2)};
}

// Every other byte as the upper one of a word.
template <bool kOdd>
inline Pairs pairs_of(Quarter quarter) {
  if constexpr (kOdd) {
    const __m256i upper = _mm256_set1_epi16(static_cast<short>(0xff00));
    return {_mm256_and_si256(quarter.low, upper), _mm256_and_si256(quarter.high, upper)};
  }
  return {_mm256_slli_epi16(quarter.low, 8), _mm256_slli_epi16(quarter.high, 8)};
}

inline void store_pairs(char* to, Pairs w) { store_bytes(to, {w.low, w.high}); }
inline Pairs load_pairs(const char* from) {
  const Bytes w = load_bytes(from);
  return {w.low, w.high};
}

inline Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

// At most 16 · 12 · 2^8 · 2^15 in 32 bits.
inline Sums multiply_pairs(Sums sums, Pairs w, const int16_t* x) {
  int pair;
  std::memcpy(&pair, x, sizeof pair);
  const __m256i both = _mm256_set1_epi32(pair);
  return {in_order(_mm256_add_epi32(sums.low, _mm256_madd_epi16(w.low, both))),
          in_order(_mm256_add_epi32(sums.high, _mm256_madd_epi16(w.high, both)))};
}
inline Lanes floats_of(Sums sums) { return {_mm256_cvtepi32_ps(sums.low), _mm256_cvtepi32_ps(sums.high)}; }

inline Lanes upper_of(Pairs w, int shift) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m128i count = _mm_cvtsi32_si128(shift);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_sll_epi32(w.low, count), upper)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_sll_epi32(w.high, count), upper))};
}

#include "nibble/nvfp4_matmul_words.h"

}  // namespace

extern const WordLoops kAvx2Words = kWordLoops;
extern const FloatLoops kAvx2Floats = kFloatLoops;
extern const ByteLoops kAvx2Bytes = kByteLoops;

}  // namespace nibble::cpu
#endif
