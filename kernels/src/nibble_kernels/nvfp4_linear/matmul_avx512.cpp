// nvfp4_matmul.h with AVX-512: all sixteen E2M1 values are one register.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"
#include "nibble/e4m3_values.h"

#if NIBBLE_HAS_X86_LEVELS
#pragma GCC diagnostic ignored "-Wuninitialized"  // in gcc 12's own header: its bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#pragma GCC target("avx512f")

namespace nibble::cpu {
namespace {

constexpr int kLanes = 16;
typedef __m512 Vec;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }

// Each vector has the even or the odd columns of two blocks.
inline void decode(const uint8_t* codes, const uint8_t* scales, Vec (&w)[kChunk / kLanes]) {
  const Vec values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                    -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + half * 16));
    const __m512i pairs = _mm512_cvtepu8_epi32(bytes);
    const Vec scale = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(kE4m3Values[scales[half * 2]]),
                                           _mm512_set1_ps(kE4m3Values[scales[half * 2 + 1]]));
    w[half * 2] = _mm512_permutexvar_ps(pairs, values) * scale;  // reads the lowest four bits of each lane
    w[half * 2 + 1] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values) * scale;
  }
}

#include "nibble/nvfp4_matmul_kernels.h"

constexpr auto kOrder = [] {
  struct {
    uint8_t column[kChunk];
  } order{};
  for (int v = 0; v < kChunk / kLanes; ++v)
    for (int l = 0; l < kLanes; ++l)
      order.column[v * kLanes + l] = static_cast<uint8_t>(v / 2 * 32 + l * 2 + v % 2);
  return order;
}();

}  // namespace

extern const MatmulLevel kAvx512Level = {2, kPanel, kOrder.column, few, many};

}  // namespace nibble::cpu
#endif
