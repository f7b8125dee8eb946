// For nvfp4_matmul_bytes.h, where registers hold all weights of a block: one dot product at a time. The file that
// includes this one defines
//
//   block_dot(w, x, offset)             a block's dot product, as Lanes: exact

#include "nibble/nvfp4_matmul_loops.h"

template <int kRows, int kTiles, class Weights>
inline void add_block_of_bytes(const Weights& weights, const Lanes (&scale)[kTiles], const QuantizedRows& x,
                               int64_t block, int64_t blocks, Lanes (&total)[kRows][kTiles]) {
  Bytes w[kTiles][4];
  for_each_of<4>([&](auto i) {
    for (int t = 0; t < kTiles; ++t) w[t][i] = weights(t, i);
  });
  for (int r = 0; r < kRows; ++r) {
    const int64_t at = r * blocks + block;
    for (int t = 0; t < kTiles; ++t) {
      const Lanes dot = block_dot(w[t], x.values + at * kBlockColumns, x.offsets + at);
      total[r][t] = fma(dot * broadcast(x.scales[at]), scale[t], total[r][t]);
    }
  }
}
