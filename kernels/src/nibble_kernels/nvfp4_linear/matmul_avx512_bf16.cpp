// nvfp4_matmul.h with AVX-512's products of BF16.
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

#include "nibble/nvfp4_weights_avx512_bf16.h"

typedef uint16_t X;
constexpr Operand kOperand = Operand::kBfloat16;
constexpr float kFactor = 1.0f;
constexpr int kStepColumns = 2;
constexpr int kFewAtOnce = 8, kTilesAtOnce = 4, kRowsAtOnce = 6;
constexpr int64_t kDepth = 32;

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
