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
inline void bytes_of(const uint8_t* codes, Bytes (&w)[4]) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  for (int half = 0; half < 2; ++half) {
    const __m512i pairs = _mm512_loadu_si512(codes + half * 64);
    w[half * 2] = _mm512_permutexvar_epi8(pairs, values);
    w[half * 2 + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(pairs, 4), values);
  }
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

#include "nibble/nvfp4_matmul_bytes.h"

}  // namespace

extern const ByteLoops kAvx512VnniBytes = kByteLoops;

}  // namespace nibble::cpu
#endif
