// nvfp4_matmul.h with AVX-512's products of bytes: sums of a block are exact integers.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_X86_LEVELS
#pragma GCC diagnostic ignored "-Wuninitialized"  // in gcc 12's own header: its bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")

namespace nibble::cpu {
namespace {

#include "nibble/nvfp4_lanes_avx512.h"

typedef __m512i Bytes;
constexpr int kFewOfBytes = 8, kTilesOfBytes = 2, kRowsOfBytes = 8;
constexpr int64_t kDepthOfBytes = 64;

// The permutation reads the lowest six bits of each byte, and only four make a difference.
template <int i>
inline Bytes bytes_of(const uint8_t* codes) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i pairs = _mm512_loadu_si512(codes + i / 2 * 64);
  return _mm512_permutexvar_epi8(i % 2 ? _mm512_srli_epi16(pairs, 4) : pairs, values);
}

inline void store_bytes(char* to, Bytes w) { _mm512_storeu_si512(to, w); }
inline Bytes load_bytes(const char* from) { return _mm512_loadu_si512(from); }

inline Lanes block_dot(const Bytes (&w)[4], const int8_t* x, const int32_t* offset) {
  __m512i sums = _mm512_set1_epi32(*offset);
  for (int i = 0; i < 4; ++i) {
    int four;
    std::memcpy(&four, x + 4 * i, sizeof four);
    sums = _mm512_dpbusd_epi32(sums, w[i], _mm512_set1_epi32(four));
  }
  return _mm512_cvtepi32_ps(sums);
}

#include "nibble/nvfp4_block_dots.h"
#include "nibble/nvfp4_matmul_bytes.h"

typedef __m512i Pairs;
typedef __m512i Quarter;
typedef __m512i Sums;
constexpr int kFewOfWords = 8, kRowsOfWords = 8;

template <int kQuarter>
inline Quarter quarter_of(const uint8_t* codes) {
  const __m512i doubled =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const __m512i pairs = _mm512_loadu_si512(codes + kQuarter / 2 * 64);
  return _mm512_permutexvar_epi8(kQuarter % 2 ? _mm512_srli_epi16(pairs, 4) : pairs, doubled);
}

// Every other byte as the upper one of a word.
template <bool kOdd>
inline Pairs pairs_of(Quarter quarter) {
  if constexpr (kOdd) return _mm512_and_si512(quarter, _mm512_set1_epi16(static_cast<short>(0xff00)));
  return _mm512_slli_epi16(quarter, 8);
}

inline void store_pairs(char* to, Pairs w) { store_bytes(to, w); }
inline Pairs load_pairs(const char* from) { return load_bytes(from); }
inline Sums no_sums() { return _mm512_setzero_si512(); }

// At most 16 · 12 · 2^8 · 2^15 in 32 bits.
inline Sums multiply_pairs(Sums sums, Pairs w, const int16_t* x) {
  int pair;
  std::memcpy(&pair, x, sizeof pair);
  return _mm512_dpwssd_epi32(sums, w, _mm512_set1_epi32(pair));
}
inline Lanes floats_of(Sums sums) { return _mm512_cvtepi32_ps(sums); }

// A permutation reads the lowest four bits of each lane.
inline Lanes column_times(float factor, const uint8_t* codes, int shift) {
  constexpr float k = 0x1p25f;
  const Lanes values = _mm512_setr_ps(0.0f, 0.5f * k, k, 1.5f * k, 2.0f * k, 3.0f * k, 4.0f * k, 6.0f * k, -0.0f,
                                      -0.5f * k, -k, -1.5f * k, -2.0f * k, -3.0f * k, -4.0f * k, -6.0f * k);
  const __m512i moved = _mm512_srl_epi32(_mm512_loadu_si512(codes), _mm_cvtsi32_si128(shift));
  return _mm512_permutexvar_ps(moved, values * broadcast(factor));
}

// The same of a pair in a panel, of its second column or of its first.
inline Lanes stored_column_times(float factor, const char* pair, bool second) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i moved = _mm512_sll_epi32(load_pairs(pair), _mm_cvtsi32_si128(second ? 0 : 16));
  return _mm512_cvtepi32_ps(_mm512_and_si512(moved, upper)) * broadcast(factor);
}

#include "nibble/nvfp4_matmul_words.h"

}  // namespace

extern const WordLoops kAvx512VnniWords = kWordLoops;
extern const ByteLoops kAvx512VnniBytes = kByteLoops;

}  // namespace nibble::cpu
#endif
