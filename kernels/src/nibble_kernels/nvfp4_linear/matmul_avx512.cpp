// nvfp4_matmul.h with AVX-512: all sixteen E2M1 values are one register.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_X86_LEVELS
#pragma GCC diagnostic ignored "-Wuninitialized"  // in gcc 12's own header: its bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c,avx512f")

namespace nibble::cpu {
namespace {

#include "nibble/nvfp4_lanes_avx512.h"

typedef float X;
constexpr Operand kOperand = Operand::kFloat;
constexpr float kFactor = 1.0f;
constexpr int kStepColumns = 1;
constexpr int kFewAtOnce = 8, kTilesAtOnce = 4, kRowsAtOnce = 6;
constexpr int64_t kDepth = 16;

// A permutation reads the lowest four bits of each lane.
template <int kColumn>
inline Lanes weights(const Decoded& decoded) {
  constexpr float k = 0x1p-7f;
  const Lanes values = _mm512_setr_ps(0.0f, 0.5f * k, k, 1.5f * k, 2.0f * k, 3.0f * k, 4.0f * k, 6.0f * k,
                                      -0.0f, -0.5f * k, -k, -1.5f * k, -2.0f * k, -3.0f * k, -4.0f * k, -6.0f * k);
  const int place = kColumn % 8 / 2 + kColumn % 2 * 4;
  return _mm512_permutexvar_ps(_mm512_srli_epi32(decoded.half[kColumn / 8], 4 * place), values);
}

inline void store_scaled(Lanes w, Lanes scale, char* to) { store(reinterpret_cast<float*>(to), w * scale); }
inline Lanes panel_weights(const char* from) { return load(reinterpret_cast<const float*>(from)); }
inline Lanes multiply(Lanes sums, Lanes w, const float* x) { return fma(w, broadcast(*x), sums); }

#include "nibble/nvfp4_matmul_floats.h"

}  // namespace

extern const FloatLoops kAvx512Floats = kFloatLoops;

}  // namespace nibble::cpu
#endif
