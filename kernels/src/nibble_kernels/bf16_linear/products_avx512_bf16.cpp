// bf16_rows.h with vdpbf16ps: two products are added to a float32 at a time; subnormal numbers count as zero.
#include "nibble/arch.h"
#include "nibble/bf16_rows.h"

#if NIBBLE_HAS_X86_LEVELS
#pragma GCC diagnostic ignored "-Wuninitialized"  // in gcc 12's own header: its bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512bf16")

namespace nibble::cpu {
namespace {

constexpr int64_t kStep = 32;

inline __m512bh columns_at(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

// The last columns, and zeros.
inline __m512bh columns_at(const uint16_t* p, int64_t count) {
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16((1u << count) - 1, p));
}

template <int kRows, int kWeights>
inline void add(__m512 (&total)[kRows][kWeights], const __m512bh (&w)[kWeights], const __m512bh (&x)[kRows]) {
  for (int row = 0; row < kRows; ++row)
    for (int n = 0; n < kWeights; ++n) total[row][n] = _mm512_dpbf16_ps(total[row][n], w[n], x[row]);
}

// kRows rows of x with kWeights rows of the weight.
template <int kRows, int kWeights>
void multiply(const uint16_t* x, const uint16_t* weight, int64_t columns, float* sums, int64_t stride) {
  __m512 total[kRows][kWeights];
  for (auto& row : total)
    for (auto& sum : row) sum = _mm512_setzero_ps();
  __m512bh w[kWeights], values[kRows];
  int64_t at = 0;
  for (; at + kStep <= columns; at += kStep) {
    for (int n = 0; n < kWeights; ++n) {
      const uint16_t* from = weight + n * columns + at;
      _mm_prefetch(reinterpret_cast<const char*>(from + kWeights * columns), _MM_HINT_NTA);  // of the next rows
      w[n] = columns_at(from);
    }
    for (int row = 0; row < kRows; ++row) values[row] = columns_at(x + row * columns + at);
    add(total, w, values);
  }
  if (at < columns) {
    for (int n = 0; n < kWeights; ++n) w[n] = columns_at(weight + n * columns + at, columns - at);
    for (int row = 0; row < kRows; ++row) values[row] = columns_at(x + row * columns + at, columns - at);
    add(total, w, values);
  }
  for (int row = 0; row < kRows; ++row)
    for (int n = 0; n < kWeights; ++n) sums[row * stride + n] = _mm512_reduce_add_ps(total[row][n]);
}

template <int kRows>
void multiply_all(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows, int64_t columns,
                  float* sums, int64_t stride) {
  if constexpr (kRows > 1) {
    if (count < kRows)
      return multiply_all<kRows - 1>(x, count, weight, weight_rows, columns, sums, stride);
  }
  constexpr int kAtOnce = kRows <= 4 ? 4 : 2;
  int64_t n = 0;
  for (; n + kAtOnce <= weight_rows; n += kAtOnce)
    multiply<kRows, kAtOnce>(x, weight + n * columns, columns, sums + n, stride);
  for (; n < weight_rows; ++n) multiply<kRows, 1>(x, weight + n * columns, columns, sums + n, stride);
}

}  // namespace

void bf16_products_avx512_bf16(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows,
                               int64_t columns, float* sums, int64_t stride) {
  multiply_all<kBf16Rows>(x, count, weight, weight_rows, columns, sums, stride);
}

}  // namespace nibble::cpu
#endif
