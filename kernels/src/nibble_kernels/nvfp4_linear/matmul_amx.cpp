// nvfp4_matmul.h with BF16 products of AMX's tiles, for more rows of activations than `few` takes. Weights are decoded
// with AVX-512, and `few` is that of AVX-512: one to eight rows would leave most of a tile empty.
//
// tdpbf16ps adds the products of 16 even and of 16 odd columns by themselves, then both sums to a float32. It rounds
// to nearest and takes subnormal numbers as zero.
#include "nibble/nvfp4_matmul.h"

#include "nibble/arch.h"

#if NIBBLE_HAS_AMX
#pragma GCC diagnostic ignored "-Wuninitialized"  // in gcc 12's own header: its bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "nibble/amx_tiles.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi")

namespace nibble::cpu {
namespace {

#include "nibble/nvfp4_weights_avx512_bf16.h"

#include "nibble/nvfp4_matmul_loops.h"

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 1024, kTileRowBytes = 64;
constexpr int64_t kStride = kPanelTiles * kLaneRows;  // of a panel's own sums

// Four tiles of the weight at once, and a tile of activations for all of them.

constexpr int64_t kDepth = 16, kStepBlocks = 2;  // blocks of a panel, which stays in L1, and of a tile
constexpr int kActivationTile = 4, kFirstWeightTile = 5, kWeightTiles = 3;

struct FloatPanel {
  alignas(64) char weights[kDepth / kStepBlocks][kPanelTiles][kTileBytes];
  // Copies of activations and sums where a tile would reach beyond them.
  alignas(64) uint16_t x[kTileRows][kDepth * kBlockColumns];
  alignas(64) float sums[kTileRows][kStride];
};

constexpr tiles::Shapes kFloatShapes = [] {
  tiles::Shapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kTileRows, kTileRowBytes);
  return shapes;
}();

// An odd block at the end is followed by zeros.
void decode_panel(const Tiles& tiles, int64_t tile_count, int64_t begin, int64_t depth, FloatPanel& panel) {
  for (int64_t t = 0; t < tile_count; ++t) {
    const Tiles tile = tiles.from(t);
    for (int64_t b = 0; b < depth; ++b) {
      const Decoded decoded(tile.codes + (begin + b) * kBlockCodeBytes);
      const Lanes scale = scales_of(tile.scales + (begin + b) * kLaneRows);
      char* const to = panel.weights[b / kStepBlocks][t] + b % kStepBlocks * (kTileBytes / kStepBlocks);
      for_each_of<kBlockColumns / 2>([&](auto step) {
        store_scaled(weights<decltype(step)::value>(decoded), scale, to + step * kTileRowBytes);
      });
    }
    if (depth % kStepBlocks)
      std::memset(panel.weights[depth / kStepBlocks][t] + kTileBytes / kStepBlocks, 0, kTileBytes / kStepBlocks);
  }
}

// Strides are in elements.
template <int kTiles>
void multiply_tiles(const FloatPanel& panel, int64_t steps, const uint16_t* x, int64_t x_stride, bool first,
                    float* sums, int64_t stride) {
  for_each_of<kTiles>([&](auto t) {
    constexpr int kSums = decltype(t)::value;
    if (first) {
      tiles::zero<kSums>();
    } else {
      tiles::load<kSums>(sums + kSums * kLaneRows, stride * sizeof *sums);
    }
  });
  for (int64_t step = 0; step < steps; ++step) {
    tiles::load<kActivationTile>(x + step * kStepBlocks * kBlockColumns, x_stride * sizeof *x);
    for_each_of<kTiles>([&](auto t) {
      constexpr int kSums = decltype(t)::value, kWeights = kFirstWeightTile + kSums % kWeightTiles;
      tiles::load<kWeights>(panel.weights[step][kSums], kTileRowBytes);
      tiles::multiply_bf16<kSums, kActivationTile, kWeights>();
    });
  }
  for_each_of<kTiles>([&](auto t) {
    constexpr int kSums = decltype(t)::value;
    tiles::store<kSums>(sums + kSums * kLaneRows, stride * sizeof *sums);
  });
}

void copy_rows(const void* from, int64_t from_bytes, int64_t rows, int64_t bytes, void* to, int64_t to_bytes) {
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_bytes, static_cast<const char*>(from) + row * from_bytes, bytes);
}

// Up to sixteen rows of activations with one panel.
template <int kTiles>
void multiply_panel(FloatPanel& panel, int64_t depth, const uint16_t* x, int64_t columns, int64_t rows, bool first,
                    float* sums, int64_t stride) {
  const int64_t steps = (depth + kStepBlocks - 1) / kStepBlocks, bytes = kTiles * kLaneRows * sizeof *sums;
  int64_t x_stride = columns;
  if (rows < kTileRows || depth % kStepBlocks) {
    std::memset(panel.x, 0, sizeof panel.x);
    copy_rows(x, columns * sizeof *x, rows, depth * kBlockColumns * sizeof *x, panel.x, sizeof panel.x[0]);
    x = panel.x[0], x_stride = kDepth * kBlockColumns;
  }
  if (rows == kTileRows) return multiply_tiles<kTiles>(panel, steps, x, x_stride, first, sums, stride);
  if (!first) copy_rows(sums, stride * sizeof *sums, rows, bytes, panel.sums, sizeof panel.sums[0]);
  multiply_tiles<kTiles>(panel, steps, x, x_stride, first, panel.sums[0], kStride);
  copy_rows(panel.sums, sizeof panel.sums[0], rows, bytes, sums, stride * sizeof *sums);
}

void many(const Tiles& tiles, int64_t tile_count, const void* activations, int64_t count, void* memory, float* sums,
          int64_t stride) {
  FloatPanel& panel = *static_cast<FloatPanel*>(memory);
  const auto* x = static_cast<const uint16_t*>(activations);
  const int64_t columns = tiles.blocks * kBlockColumns;
  tiles::configure(kFloatShapes);
  for (int64_t begin = 0; begin < tiles.blocks; begin += kDepth) {
    const int64_t depth = std::min(kDepth, tiles.blocks - begin);
    decode_panel(tiles, tile_count, begin, depth, panel);
    for (int64_t row = 0; row < count; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, count - row);
      float* const to = sums + row * stride;
      with_count<kPanelTiles>(tile_count, [&](auto n) {
        multiply_panel<decltype(n)::value>(panel, depth, x + row * columns + begin * kBlockColumns, columns, rows,
                                           begin == 0, to, stride);
      });
      if (begin + depth < tiles.blocks) continue;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t lane = 0; lane < tile_count * kLaneRows; lane += kLaneRows)
          store(to + r * stride + lane, load(to + r * stride + lane) * broadcast(kSumFactor));
    }
  }
  tiles::release();
}

}  // namespace

#pragma GCC pop_options

FloatLoops with_amx(FloatLoops loops) {
  loops.panel_bytes = sizeof(FloatPanel), loops.many = many;
  return loops;
}

}  // namespace nibble::cpu
#endif
