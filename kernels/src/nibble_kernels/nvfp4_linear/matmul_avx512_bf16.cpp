// nvfp4_matmul.h with AVX-512's products of BF16: an E2M1 value and one times its scale are exact in BF16.
//
// vdpbf16ps adds the products of two columns to a float32, rounding to nearest; subnormal numbers count as
// zero.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_X86_LEVELS
#pragma GCC diagnostic ignored "-Wuninitialized"  // in gcc 12's own header: its bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")

namespace nibble::cpu {
namespace {

#include "nibble/nvfp4_lanes_avx512.h"

typedef uint16_t X;
constexpr Operand kOperand = Operand::kBfloat16;
constexpr float kFactor = 1.0f;
constexpr int kStepColumns = 2;
constexpr int kFewAtOnce = 8, kTilesAtOnce = 4, kRowsAtOnce = 6;
constexpr int64_t kDepth = 32;

// The upper half of the float32 2^-7 · value. The permutation reads the lowest five bits of each word, and
// the fifth, the next code's, makes no difference.
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
inline __m512i panel_weights(const char* from) { return _mm512_loadu_si512(from); }

inline Lanes multiply(Lanes sums, __m512i w, const uint16_t* x) {
  int pair;
  std::memcpy(&pair, x, sizeof pair);
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(w),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}

#include "nibble/nvfp4_matmul_floats.h"

}  // namespace

extern const FloatLoops kAvx512Bf16Floats = kFloatLoops;

}  // namespace nibble::cpu
#endif
