// Sixteen floats in a register of AVX-512; included in the unnamed namespaces of the files that may use it.
#pragma once

typedef __m512 Lanes;

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a); }
inline Lanes broadcast(float x) { return _mm512_set1_ps(x); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }

// An E4M3 number is a float16 with other exponents: its bits moved by 7, the sign by 8, are 2^-8 of it.
inline Lanes scales_of(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return _mm512_cvtph_ps(moved);
}

// The codes of a block of sixteen rows.
struct Decoded {
  __m512i half[2];
  explicit Decoded(const uint8_t* codes) : half{_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 64)} {}
};
