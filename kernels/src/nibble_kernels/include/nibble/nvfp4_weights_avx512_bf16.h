// Weights as BF16 in registers of AVX-512: an E2M1 value and one times its scale are exact. Included in the unnamed
// namespaces of the files that may use them.
#pragma once

#include "nibble/nvfp4_lanes_avx512.h"

// Two columns of sixteen rows: the upper half of the float32 2^-7 · value. The permutation reads the lowest five bits
// of each word, and the fifth, the next code's, makes no difference.
template <int kStep>
inline __m512i weights(const Decoded& decoded) {
  const __m256i values = _mm256_setr_epi16(
      0, 0x3b80, 0x3c00, 0x3c40, 0x3c80, 0x3cc0, 0x3d00, 0x3d40, -0x8000, 0x3b80 - 0x8000, 0x3c00 - 0x8000,
      0x3c40 - 0x8000, 0x3c80 - 0x8000, 0x3cc0 - 0x8000, 0x3d00 - 0x8000, 0x3d40 - 0x8000);
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(decoded.half[kStep / 4], kStep % 4 * 4),
                                  _mm512_broadcast_i64x4(values));
}

inline void store_scaled(__m512i w, Lanes scale, char* to) {
  const __m512i odd_columns = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const Lanes even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)) * scale;
  const Lanes odd = _mm512_castsi512_ps(_mm512_and_si512(w, odd_columns)) * scale;
  _mm512_storeu_si512(to,
                      _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd)));
}
