// nibble::bf16_leading on the CPU: the largest products of rows with a BF16 weight. The weight's copy in eight
// bits gives a product with a bound for its error. Only products that may be among the largest are computed.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "nibble/bf16_rows.h"
#include "nibble/cpu.h"
#include "nibble/nvfp4_matmul.h"
#include "nibble/share_out.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kGroup = 64, kPieceBytes = 64 << 10, kAheadBytes = 8192, kLineBytes = 64, kRowsAtOnce = 4;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Rounding of bounds, and of products to bfloat16, where different ones may become equal.
constexpr float kBoundSlack = 1.0f + 1e-4f, kProductSlack = 1e-6f, kRoundingSlack = 1.01f / 128;

// The largest code of x: sums of products with 127 fit into 32 bits.
float most_code(int64_t columns) { return std::floor(std::min(8191.0f, 0x1p31f / (128.0f * columns))); }

// A row of x in integers, and how far they are from it.
struct Row {
  std::vector<int16_t> codes;
  float scale, size, rest;  // the norms of the row and of what the codes lack

  Row(const uint16_t* x, int64_t columns) : codes(columns) {
    std::vector<float> values(columns);
    float most = 0;
    double squares = 0, rests = 0;
    for (int64_t i = 0; i < columns; ++i) {
      values[i] = std::bit_cast<float>(static_cast<uint32_t>(x[i]) << 16);
      most = std::max(most, std::fabs(values[i]));
      squares += static_cast<double>(values[i]) * values[i];
    }
    scale = most / most_code(columns);
    const bool is_usual = std::isfinite(squares) && scale >= std::numeric_limits<float>::min();
    if (!is_usual) scale = 0;
    for (int64_t i = 0; i < columns; ++i) {
      codes[i] = is_usual ? static_cast<int16_t>(std::lrintf(values[i] / scale)) : 0;
      const double rest_of = values[i] - static_cast<double>(codes[i]) * scale;
      rests += rest_of * rest_of;
    }
    size = static_cast<float>(std::sqrt(squares)) * kBoundSlack;
    rest = static_cast<float>(std::sqrt(rests)) * kBoundSlack;
  }
};

// Sums of `count` rows of the weight with one row of codes of x, or with four.
NIBBLE_CPU_LEVELS void add_up(const int16_t* x, const int8_t* weight, int64_t count, int64_t columns, int32_t* sums) {
  for (int64_t n = 0; n < count; ++n, weight += columns) {
    for (int64_t at = 0; at < columns; at += kLineBytes) __builtin_prefetch(weight + kAheadBytes + at);
    int32_t sum = 0;
#pragma GCC unroll 4
    for (int64_t k = 0; k < columns; ++k) sum += static_cast<int32_t>(x[k]) * static_cast<int32_t>(weight[k]);
    sums[n] = sum;
  }
}
NIBBLE_CPU_LEVELS void add_up_four(const int16_t* const (&x)[kRowsAtOnce], const int8_t* weight, int64_t count,
                                   int64_t columns, int32_t* sums) {
  const int16_t *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
  for (int64_t n = 0; n < count; ++n, weight += columns) {
    for (int64_t at = 0; at < columns; at += kLineBytes) __builtin_prefetch(weight + kAheadBytes + at);
    int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (int64_t k = 0; k < columns; ++k) {
      const int32_t by = weight[k];
      s0 += x0[k] * by, s1 += x1[k] * by, s2 += x2[k] * by, s3 += x3[k] * by;
    }
    sums[n] = s0, sums[kGroup + n] = s1, sums[2 * kGroup + n] = s2, sums[3 * kGroup + n] = s3;
  }
}

int64_t groups_of(int64_t products) { return (products + kGroup - 1) / kGroup; }

// Of each row of x: the most that each product can be, and for groups of neighbouring products the most of these
// and the largest number that one of the products is not below.
struct Bounds {
  std::vector<float> most, group_most, group_least;

  Bounds(int64_t products, int64_t groups) : most(products), group_most(groups), group_least(groups) {}

  // What products among the `count` largest, or equal to the least of them, are not below.
  float threshold(int64_t count) const {
    if (count > static_cast<int64_t>(group_least.size())) return -kInfinity;
    std::vector<float> least = group_least;
    std::nth_element(least.begin(), least.begin() + (count - 1), least.end(), std::greater<>());
    const float found = least[count - 1];
    return found - std::fabs(found) * kRoundingSlack - std::numeric_limits<float>::min();
  }
};

// Of some rows of the weight: their scales, the norms of what their codes lack, and of what the codes give.
struct Measures {
  const float *scales, *rests, *sizes;
};

// The bounds of up to kGroup products, of which the largest are returned.
struct Largest {
  float most, least;
};
NIBBLE_CPU_LEVELS Largest bound(const int32_t* sums, const Measures& weight, int64_t count, float scale, float size,
                                float rest, float* most) {
  float least[kGroup];
  for (int64_t n = 0; n < count; ++n) {
    const float product = static_cast<float>(sums[n]) * (scale * weight.scales[n]);
    const float error = weight.rests[n] * size + weight.sizes[n] * rest;
    const float margin = error * kBoundSlack + std::fabs(product) * kProductSlack;
    most[n] = product + margin;
    least[n] = product - margin;
  }
  Largest found{-kInfinity, -kInfinity};
  for (int64_t n = 0; n < count; ++n) {
    found.most = most[n] > found.most ? most[n] : found.most;
    found.least = least[n] > found.least ? least[n] : found.least;
  }
  return found;
}

// The bounds of each row's products with a weight of these codes.
std::vector<Bounds> bounds_of(const std::vector<Row>& rows, const int8_t* code, const float* measure, int64_t products,
                              int64_t columns) {
  const int64_t count = static_cast<int64_t>(rows.size()), groups = groups_of(products);
  const int64_t unit = std::max<int64_t>(1, kPieceBytes / (kGroup * columns)), pieces = (groups + unit - 1) / unit;
  std::vector<Bounds> bounds(count, Bounds(products, groups));
  share_out(pieces, [&](int64_t piece) {
    int32_t sums[kRowsAtOnce * kGroup];
    for (int64_t group = piece * unit; group < std::min((piece + 1) * unit, groups); ++group) {
      const int64_t first = group * kGroup, here = std::min(kGroup, products - first);
      const Measures own{measure + first, measure + products + first, measure + 2 * products + first};
      for (int64_t i = 0; i < count;) {
        const int64_t at_once = std::min(kRowsAtOnce, count - i);
        const int16_t* x_codes[kRowsAtOnce];  // the last row again where there are fewer
        for (int64_t k = 0; k < kRowsAtOnce; ++k) x_codes[k] = rows[i + std::min(k, at_once - 1)].codes.data();
        if (at_once == 1) {
          add_up(x_codes[0], code + first * columns, here, columns, sums);
        } else {
          add_up_four(x_codes, code + first * columns, here, columns, sums);
        }
        for (int64_t k = 0; k < at_once; ++k, ++i) {
          const Row& by = rows[i];
          const Largest found = bound(sums + k * kGroup, own, here, by.scale, by.size, by.rest,
                                      bounds[i].most.data() + first);
          bounds[i].group_most[group] = found.most, bounds[i].group_least[group] = found.least;
        }
      }
    }
  });
  return bounds;
}

Tensor bf16_leading(const Tensor& input, const Tensor& weight, const Tensor& codes, const Tensor& measures,
                    const Tensor& counts) {
  std::optional<WithThreads> threads;
  if (Threads::exist()) threads.emplace();
  const Tensor x = torch::stable::contiguous(input);
  const int64_t columns = weight.size(1), products = weight.size(0), rows = x.size(0);
  require(x.scalar_type() == ScalarType::BFloat16 && x.dim() == 2 && x.size(1) == columns &&
              weight.scalar_type() == ScalarType::BFloat16 && weight.is_contiguous() && weight.dim() == 2,
          "bf16_leading takes bfloat16 rows of ", columns, " and a contiguous bfloat16 weight");
  require(codes.scalar_type() == ScalarType::Char && codes.is_contiguous() && codes.numel() == products * columns &&
              measures.scalar_type() == ScalarType::Float && measures.is_contiguous() &&
              measures.numel() == 3 * products,
          "the weight's codes are not those of sketch_of");
  require(counts.scalar_type() == ScalarType::Long && counts.is_contiguous() && counts.numel() == rows,
          "bf16_leading takes an int64 count for each row");
  Tensor y = torch::stable::new_empty(x, {rows, products});
  auto* const to = static_cast<torch::headeronly::BFloat16*>(y.mutable_data_ptr());
  const auto* const from = static_cast<const uint16_t*>(x.const_data_ptr());
  const auto* const w = static_cast<const uint16_t*>(weight.const_data_ptr());
  const auto* const code = static_cast<const int8_t*>(codes.const_data_ptr());
  const auto* const measure = static_cast<const float*>(measures.const_data_ptr());
  const auto* const count = static_cast<const int64_t*>(counts.const_data_ptr());

  const int64_t groups = groups_of(products);
  std::vector<Row> row;
  for (int64_t i = 0; i < rows; ++i) row.emplace_back(from + i * columns, columns);
  const std::vector<Bounds> bounds = bounds_of(row, code, measure, products, columns);
  const Bf16Products exact = bf16_products_of_level();
  std::vector<float> thresholds;
  for (int64_t i = 0; i < rows; ++i)
    thresholds.push_back(std::isfinite(row[i].size) ? bounds[i].threshold(count[i]) : -kInfinity);
  share_out(rows * groups, [&](int64_t place) {
    const int64_t i = place / groups, group = place % groups, first = group * kGroup,
                  last = std::min(first + kGroup, products);
    auto* const own = to + i * products;
    std::fill(own + first, own + last, static_cast<torch::headeronly::BFloat16>(-kInfinity));
    if (bounds[i].group_most[group] < thresholds[i]) return;
    for (int64_t n = first; n < last; ++n) {
      if (bounds[i].most[n] < thresholds[i]) continue;
      float sum;
      exact(from + i * columns, 1, w + n * columns, 1, columns, &sum, 1);
      own[n] = static_cast<torch::headeronly::BFloat16>(sum);
    }
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) { library.impl("bf16_leading", TORCH_BOX(&bf16_leading)); }

}  // namespace nibble::cpu
