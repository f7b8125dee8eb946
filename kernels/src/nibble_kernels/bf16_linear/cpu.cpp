// nibble::bf16_linear on the CPU: a few rows times a large BF16 weight, at the speed of memory.
#include <optional>

#include "nibble/bf16_rows.h"
#include "nibble/cpu.h"
#include "nibble/nvfp4_matmul.h"
#include "nibble/share_out.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kLanes = 32, kPieceBytes = 128 << 10, kLevelWithAvx2 = 1, kLevelWithBf16 = 5;

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));

NIBBLE_FUNCTION Floats floats_at(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Floats floats;
  std::memcpy(&floats, &words, sizeof floats);
  return floats;
}

NIBBLE_CPU_LEVELS float product(const uint16_t* x, const uint16_t* weight, int64_t columns) {
  Floats total = {};
  int64_t at = 0;
  for (; at + kLanes <= columns; at += kLanes) total += floats_at(x + at) * floats_at(weight + at);
  float lanes[kLanes];
  std::memcpy(lanes, &total, sizeof lanes);
  for (int64_t i = 0; at + i < columns; ++i)
    lanes[i] += std::bit_cast<float>(static_cast<uint32_t>(x[at + i]) << 16) *
                std::bit_cast<float>(static_cast<uint32_t>(weight[at + i]) << 16);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

Tensor bf16_linear(const Tensor& input, const Tensor& weight) {
  std::optional<WithThreads> threads;
  if (Threads::exist()) threads.emplace();
  const Tensor x = torch::stable::contiguous(input);
  const int64_t columns = weight.size(1), weight_rows = weight.size(0), rows = x.numel() / columns;
  require(x.scalar_type() == ScalarType::BFloat16 && weight.scalar_type() == ScalarType::BFloat16 &&
              weight.is_contiguous() && weight.dim() == 2 && x.size(x.dim() - 1) == columns,
          "bf16_linear takes bfloat16 rows of ", columns, " and a contiguous bfloat16 weight");
  Tensor y = torch::stable::new_empty(x, with_last(x, weight_rows));
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  const auto* w = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* to = static_cast<torch::headeronly::BFloat16*>(y.mutable_data_ptr());
  const Bf16Products products = bf16_products_of_level();
  const int64_t unit = std::max<int64_t>(4, kPieceBytes / (2 * columns) / 4 * 4);
  share_out((weight_rows + unit - 1) / unit, [&](int64_t piece) {
    const int64_t first = piece * unit, count = std::min(unit, weight_rows - first);
    thread_local std::vector<float> sums;
    sums.resize(kBf16Rows * unit);
    for (int64_t row = 0; row < rows; row += kBf16Rows) {
      const int64_t at_once = std::min(kBf16Rows, rows - row);
      products(from + row * columns, at_once, w + first * columns, count, columns, sums.data(), unit);
      for (int64_t i = 0; i < at_once; ++i)
        store(sums.data() + i * unit, count, to + (row + i) * weight_rows + first);
    }
  });
  return y;
}

}  // namespace

void bf16_products(const uint16_t* x, int64_t count, const uint16_t* weight, int64_t weight_rows, int64_t columns,
                   float* sums, int64_t stride) {
  for (int64_t n = 0; n < weight_rows; ++n)
    for (int64_t row = 0; row < count; ++row)
      sums[row * stride + n] = product(x + row * columns, weight + n * columns, columns);
}

Bf16Products bf16_products_of_level() {
#if NIBBLE_HAS_X86_LEVELS
  if (matmul_level().number >= kLevelWithBf16) return bf16_products_avx512_bf16;
  if (matmul_level().number >= kLevelWithAvx2) return bf16_products_avx2;
#endif
  return bf16_products;
}

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) { library.impl("bf16_linear", TORCH_BOX(&bf16_linear)); }

}  // namespace nibble::cpu
