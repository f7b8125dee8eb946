// Sixteen rows of a weight in two registers of AVX2; included in the unnamed namespaces of the files that may use
// it.
#pragma once

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

struct Bytes {
  __m256i low, high;
};
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

// The integers at p in every lane.
inline __m256i broadcast_four(const void* p) {
  int four;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

struct Pairs {
  __m256i low, high;
};
typedef Pairs Quarter;
typedef Pairs Sums;

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

inline Lanes floats_of(Sums sums) { return {_mm256_cvtepi32_ps(sums.low), _mm256_cvtepi32_ps(sums.high)}; }

// The permutation reads the lowest three bits of each lane; the fourth is the sign.
inline __m256 column_of(__m256 magnitudes, __m256i codes, __m128i shift) {
  const __m256i moved = _mm256_srl_epi32(codes, shift);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(moved, 28), _mm256_set1_epi32(INT32_MIN));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, moved), _mm256_castsi256_ps(sign));
}
inline Lanes column_times(float factor, const uint8_t* codes, int shift) {
  constexpr float k = 0x1p25f;
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f * k, k, 1.5f * k, 2.0f * k, 3.0f * k, 4.0f * k, 6.0f * k);
  const __m256 products = magnitudes * _mm256_set1_ps(factor);
  const __m128i bits = _mm_cvtsi32_si128(shift);
  return {column_of(products, codes_at(codes), bits), column_of(products, codes_at(codes + 32), bits)};
}

// The same of a pair in a panel, of its second column or of its first.
inline __m256 upper_words(__m256i pairs, __m128i shift) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_sll_epi32(pairs, shift), upper));
}
inline Lanes stored_column_times(float factor, const char* pair, bool second) {
  const Pairs w = load_pairs(pair);
  const __m128i shift = _mm_cvtsi32_si128(second ? 0 : 16);
  return Lanes{upper_words(w.low, shift), upper_words(w.high, shift)} * broadcast(factor);
}
