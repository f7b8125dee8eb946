// bf16_rows.h with AVX2 and FMA: even and odd columns of a weight become float32 by a shift and a mask.
#include "nibble/arch.h"
#include "nibble/bf16_rows.h"

#if NIBBLE_HAS_X86_LEVELS
#include <immintrin.h>

#include <vector>

#pragma GCC target("avx2,fma")

namespace nibble::cpu {
namespace {

constexpr int64_t kStep = 16;
constexpr int kSumsAtOnce = 4;  // rows of x times rows of the weight, two registers each
// Columns up to which one row of x takes rows of the weight one by one: several short ones side by side begin
// and end too often for the processor to read ahead (Zen 3, two threads).
constexpr int64_t kShortRow = 1024;
constexpr int64_t kAhead = 8192;  // columns between what is read and what is prefetched

inline __m256i columns_at(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m256 even(__m256i columns) { return _mm256_castsi256_ps(_mm256_slli_epi32(columns, 16)); }
inline __m256 odd(__m256i columns) {
  return _mm256_castsi256_ps(_mm256_and_si256(columns, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// Each sixteen columns as eight even ones and eight odd ones, the last ones with zeros.
void split_row(const uint16_t* x, int64_t columns, float* to) {
  int64_t at = 0;
  for (; at + kStep <= columns; at += kStep) {
    const __m256i part = columns_at(x + at);
    _mm256_storeu_ps(to + at, even(part));
    _mm256_storeu_ps(to + at + 8, odd(part));
  }
  if (at == columns) return;
  alignas(32) uint16_t last[kStep] = {};
  for (int64_t i = 0; at + i < columns; ++i) last[i] = x[at + i];
  _mm256_storeu_ps(to + at, even(columns_at(last)));
  _mm256_storeu_ps(to + at + 8, odd(columns_at(last)));
}

inline float sum_of(__m256 a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <int kRows, int kWeights>
struct Sums {
  __m256 even[kRows][kWeights], odd[kRows][kWeights];
};

template <int kRows, int kWeights>
inline void add(Sums<kRows, kWeights>& sums, const __m256i (&w)[kWeights], const float* x, int64_t stride) {
  for (int n = 0; n < kWeights; ++n) {
    const __m256 evens = even(w[n]), odds = odd(w[n]);
    for (int row = 0; row < kRows; ++row) {
      sums.even[row][n] = _mm256_fmadd_ps(evens, _mm256_loadu_ps(x + row * stride), sums.even[row][n]);
      sums.odd[row][n] = _mm256_fmadd_ps(odds, _mm256_loadu_ps(x + row * stride + 8), sums.odd[row][n]);
    }
  }
}

// kRows rows of x, `x_stride` apart, with kWeights rows of the weight.
template <int kRows, int kWeights>
void multiply(const float* x, int64_t x_stride, const uint16_t* weight, int64_t columns, float* to,
              int64_t stride) {
  Sums<kRows, kWeights> sums;
  for (int row = 0; row < kRows; ++row)
    for (int n = 0; n < kWeights; ++n) sums.even[row][n] = sums.odd[row][n] = _mm256_setzero_ps();
  __m256i w[kWeights];
  int64_t at = 0;
  for (; at + kStep <= columns; at += kStep) {
    for (int n = 0; n < kWeights; ++n) {
      const uint16_t* from = weight + n * columns + at;
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_NTA);
      w[n] = columns_at(from);
    }
    add(sums, w, x + at, x_stride);
  }
  if (at < columns) {
    for (int n = 0; n < kWeights; ++n) {
      alignas(32) uint16_t last[kStep] = {};
      for (int64_t i = 0; at + i < columns; ++i) last[i] = weight[n * columns + at + i];
      w[n] = columns_at(last);
    }
    add(sums, w, x + at, x_stride);
  }
  for (int row = 0; row < kRows; ++row)
    for (int n = 0; n < kWeights; ++n)
      to[row * stride + n] = sum_of(_mm256_add_ps(sums.even[row][n], sums.odd[row][n]));
}

template <int kRows>
void multiply_all(const float* x, int64_t x_stride, int64_t count, const uint16_t* weight,
                  int64_t weight_rows, int64_t columns, float* sums, int64_t stride) {
  if constexpr (kRows > 1) {
    if (count < kRows)
      return multiply_all<kRows - 1>(x, x_stride, count, weight, weight_rows, columns, sums, stride);
  }
  constexpr int kAtOnce = kSumsAtOnce / kRows;
  int64_t n = 0;
  if (kRows > 1 || columns > kShortRow)
    for (; n + kAtOnce <= weight_rows; n += kAtOnce)
      multiply<kRows, kAtOnce>(x, x_stride, weight + n * columns, columns, sums + n, stride);
  for (; n < weight_rows; ++n)
    multiply<kRows, 1>(x, x_stride, weight + n * columns, columns, sums + n, stride);
}

}  // namespace

void bf16_products_avx2(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows,
                        int64_t columns, float* sums, int64_t stride) {
  thread_local std::vector<float> split;
  const int64_t x_stride = (columns + kStep - 1) / kStep * kStep;
  split.resize(kBf16Rows * x_stride);
  for (int64_t row = 0; row < count; ++row)
    split_row(x + row * columns, columns, split.data() + row * x_stride);
  for (int64_t row = 0; row < count; row += kSumsAtOnce)
    multiply_all<kSumsAtOnce>(split.data() + row * x_stride, x_stride,
                              count - row < kSumsAtOnce ? count - row : kSumsAtOnce, weight, weight_rows,
                              columns, sums + row * stride, stride);
}

}  // namespace nibble::cpu
#endif
