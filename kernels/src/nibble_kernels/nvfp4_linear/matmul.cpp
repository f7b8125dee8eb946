// nvfp4_matmul.h: which instructions this processor has, and activations in the layout that they want.
#include "nibble/nvfp4_matmul.h"

#include <algorithm>
#include <atomic>

#include "nibble/arch.h"

namespace nibble::cpu {

extern const MatmulLevel kPortableLevel;
#if NIBBLE_HAS_X86_LEVELS
extern const MatmulLevel kAvx2Level, kAvx512Level;
#endif

const std::vector<const MatmulLevel*>& matmul_levels() {
  static const std::vector<const MatmulLevel*> levels = [] {
    std::vector<const MatmulLevel*> found;
#if NIBBLE_HAS_X86_LEVELS
    if (__builtin_cpu_supports("avx512f")) found.push_back(&kAvx512Level);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2Level);
#endif
    found.push_back(&kPortableLevel);
    return found;
  }();
  return levels;
}

static std::atomic<int64_t> chosen_level{0};

const MatmulLevel& matmul_level() { return *matmul_levels()[chosen_level]; }

void use_matmul_level(int64_t index) { chosen_level = index; }

Activations::Activations(int64_t rows, int64_t columns)
    : level_(matmul_level()),
      rows_(rows),
      columns_(columns),
      padded_columns_((columns + kChunk - 1) / kChunk * kChunk),
      few_(rows <= kFewRows) {
  const int64_t panel = level_.panel_rows;
  stride_ = few_ ? rows : (rows + panel - 1) / panel * panel;
  values_.resize(stride_ * padded_columns_);
}

void Activations::set_row(int64_t row, const float* x) {
  const int64_t panel = few_ ? 1 : level_.panel_rows;
  float* to = values_.data() + row / panel * panel * padded_columns_ + row % panel;
  for (int64_t chunk = 0; chunk < columns_; chunk += kChunk) {
    for (int64_t i = 0; i < kChunk; ++i) {
      const int64_t column = chunk + level_.order[i];
      if (column < columns_) to[(chunk + i) * panel] = x[column];
    }
  }
}

void Activations::multiply(const Nvfp4Weight& weight, int64_t begin, int64_t end, float* sums) const {
  if (!few_) return level_.many(weight, begin, end, values_.data(), stride_ / level_.panel_rows, sums);
  for (int64_t row = 0; row < rows_; row += 4) {
    const int64_t count = std::min<int64_t>(4, rows_ - row);
    level_.few(weight, begin, end, values_.data() + row * padded_columns_, count, sums + row, stride_);
  }
}

}  // namespace nibble::cpu
