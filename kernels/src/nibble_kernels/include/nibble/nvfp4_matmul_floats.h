// The products of activations in BF16 or float32 (nvfp4_matmul.h), for the instructions of the file that
// includes this one. That file defines, in its unnamed namespace,
//
//   Lanes                               16 floats, one a weight row
//   zero(), load(p), store(p, a), fma(a, b, c), broadcast(x), a * b
//   scales_of(p)                        16 E4M3 scales times 2^-8
//   X, kStepColumns                     an element of x; columns that one step multiplies
//   Decoded                             the codes of a block
//   weights<step>(decoded)              what a step multiplies, times 2^-7 / kFactor
//   store_scaled(weights, scales, p)    a step's weights times their scales, for the panel
//   panel_weights(p)                    and back
//   multiply(sums, weights, x)          sums + weights · x, with x the same in every lane
//   kFactor                             a power of two that multiplies x where it is float32
//   kFewAtOnce, kTilesAtOnce, kRowsAtOnce, kDepth (blocks of a panel)
//
// where every function may use instructions that the rest of the library may not.

#include "nibble/nvfp4_matmul_loops.h"

constexpr int kSteps = kBlockColumns / kStepColumns;

template <int kCount, int... kStep>
inline void add_block(const Decoded& decoded, const X* x, int64_t columns, Lanes (&block)[kCount],
                      std::integer_sequence<int, kStep...>) {
  (
      [&] {
        const auto w = weights<kStep>(decoded);
        for (int m = 0; m < kCount; ++m)
          block[m] = multiply(block[m], w, x + m * columns + kStep * kStepColumns);
      }(),
      ...);
}

// Each block's products are summed first, then scaled and added.
template <int kCount>
void few_rows(const Tiles& tile, const X* x, float* sums, int64_t stride) {
  const int64_t columns = tile.blocks * kBlockColumns;
  const uint8_t *codes = tile.codes, *scales = tile.scales;
  Lanes total[kCount];
  for (int m = 0; m < kCount; ++m) total[m] = zero();
  for (int64_t b = 0; b < tile.blocks; ++b) {
    fetch(codes, scales, b);
    const Decoded decoded(codes);
    Lanes block[kCount];
    for (int m = 0; m < kCount; ++m) block[m] = zero();
    add_block(decoded, x, columns, block, std::make_integer_sequence<int, kSteps>());
    const Lanes scale = scales_of(scales);
    for (int m = 0; m < kCount; ++m) total[m] = fma(block[m], scale, total[m]);
    codes += kBlockCodeBytes, scales += kLaneRows, x += kBlockColumns;
  }
  for (int m = 0; m < kCount; ++m) store(sums + m * stride, total[m] * broadcast(kSumFactor));
}

void few(const Tiles& tile, const void* x, int64_t count, float* sums, int64_t stride) {
  with_count<kFewAtOnce>(
      count, [&](auto n) { few_rows<decltype(n)::value>(tile, static_cast<const X*>(x), sums, stride); });
}

constexpr int kStepBytes = kLaneRows * kStepColumns * sizeof(X);

template <int... kStep>
inline void decode_block(const uint8_t* codes, const uint8_t* scales, char* to,
                         std::integer_sequence<int, kStep...>) {
  const Decoded decoded(codes);
  const Lanes scale = scales_of(scales);
  (store_scaled(weights<kStep>(decoded), scale, to + kStep * kTilesAtOnce * kStepBytes), ...);
}

// kRows rows times kTiles tiles of a panel, `steps` deep: sums start at zero in the first panel and get their
// factor in the last.
template <int kTiles, int kRows>
void multiply_panel(const char* panel, int64_t steps, const X* x, int64_t columns, bool first, bool last,
                    float* sums, int64_t stride) {
  Lanes total[kRows][kTiles];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      total[r][t] = first ? zero() : load(sums + r * stride + t * kLaneRows);
  for (int64_t step = 0; step < steps; ++step) {
    decltype(panel_weights(panel)) w[kTiles];
    for (int t = 0; t < kTiles; ++t)
      w[t] = panel_weights(panel + (step * kTilesAtOnce + t) * kStepBytes);
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        total[r][t] = multiply(total[r][t], w[t], x + r * columns + step * kStepColumns);
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      store(sums + r * stride + t * kLaneRows, last ? total[r][t] * broadcast(kSumFactor) : total[r][t]);
}

template <int kTiles>
void many_tiles(const Tiles& tiles, const X* x, int64_t count, char* panel, float* sums, int64_t stride) {
  const int64_t columns = tiles.blocks * kBlockColumns;
  for (int64_t begin = 0; begin < tiles.blocks; begin += kDepth) {
    const int64_t depth = tiles.blocks - begin < kDepth ? tiles.blocks - begin : kDepth;
    for (int t = 0; t < kTiles; ++t) {
      const Tiles tile = tiles.from(t);
      for (int64_t b = 0; b < depth; ++b)
        decode_block(tile.codes + (begin + b) * kBlockCodeBytes, tile.scales + (begin + b) * kLaneRows,
                     panel + (b * kSteps * kTilesAtOnce + t) * kStepBytes,
                     std::make_integer_sequence<int, kSteps>());
    }
    for (int64_t row = 0; row < count; row += kRowsAtOnce) {
      with_count<kRowsAtOnce>(count - row < kRowsAtOnce ? count - row : kRowsAtOnce, [&](auto n) {
        multiply_panel<kTiles, decltype(n)::value>(
            panel, depth * kSteps, x + row * columns + begin * kBlockColumns, columns, begin == 0,
            begin + depth == tiles.blocks, sums + row * stride, stride);
      });
    }
  }
}

void many(const Tiles& tiles, int64_t tile_count, const void* x, int64_t count, void* panel, float* sums,
          int64_t stride) {
  for (int64_t tile = 0; tile < tile_count; tile += kTilesAtOnce) {
    with_count<kTilesAtOnce>(tile_count - tile < kTilesAtOnce ? tile_count - tile : kTilesAtOnce, [&](auto n) {
      many_tiles<decltype(n)::value>(tiles.from(tile), static_cast<const X*>(x), count,
                                     static_cast<char*>(panel), sums + tile * kLaneRows, stride);
    });
  }
}

constexpr FloatLoops kFloatLoops = {kOperand, kFactor, kFewAtOnce, kDepth * kSteps * kTilesAtOnce * kStepBytes,
                                    few, many};
