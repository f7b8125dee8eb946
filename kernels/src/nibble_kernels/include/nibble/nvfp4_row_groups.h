// For nvfp4_matmul_bytes.h, where registers do not hold all weights of a block beside the sums: up to four rows of
// activations at once, so that their sums wait for nothing. Five to eight rows are two groups, and weights are
// decoded once for both. The file that includes this one defines
//
//   start_of_sums(x, at)                          Bytes, of block `at`
//   multiply_bytes(sums, w, p)                    adds the products with four columns
//   add_scaled(sums, scale, x, at, total)         adds them, times both scales, to the total

#include "nibble/nvfp4_matmul_loops.h"

constexpr int kGroupRows = 4;

template <int kCount, class Weights>
NIBBLE_FUNCTION void add_block_to_group(const Weights& weights, const Lanes& scale, const QuantizedRows& x, int64_t block,
                               int64_t blocks, Lanes (*total)[1]) {
  const auto at = [&](int r) { return r * blocks + block; };
  Bytes sums[kCount];
  for (int r = 0; r < kCount; ++r) sums[r] = start_of_sums(x, at(r));
  for_each_of<4>([&](auto i) {
    const Bytes w = weights(i);
    for (int r = 0; r < kCount; ++r) sums[r] = multiply_bytes(sums[r], w, x.values + at(r) * kBlockColumns + 4 * i);
  });
  for (int r = 0; r < kCount; ++r) add_scaled(sums[r], scale, x, at(r), total[r][0]);
}

template <int kRows, class Weights>
inline void add_block_of_bytes(const Weights& weights, const Lanes (&scale)[1], const QuantizedRows& x, int64_t block,
                               int64_t blocks, Lanes (&total)[kRows][1]) {
  if constexpr (kRows <= kGroupRows) {
    add_block_to_group<kRows>([&](auto i) { return weights(0, i); }, scale[0], x, block, blocks, total);
  } else {
    static_assert(kRows <= 2 * kGroupRows);
    constexpr int kFirst = (kRows + 1) / 2;
    Bytes w[4];
    for_each_of<4>([&](auto i) { w[i] = weights(0, i); });
    const auto decoded = [&](int i) { return w[i]; };
    add_block_to_group<kFirst>(decoded, scale[0], x, block, blocks, total);
    add_block_to_group<kRows - kFirst>(decoded, scale[0], x, kFirst * blocks + block, blocks, total + kFirst);
  }
}
