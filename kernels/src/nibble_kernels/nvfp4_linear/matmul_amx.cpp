// nvfp4_matmul.h with products of AMX's tiles, for more rows of activations than `few` takes. Weights are decoded
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

// --- BF16: four tiles of the weight at once, and a tile of activations for all of them ---

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

// --- bytes: four blocks at once, each in a tile of its own, because each has its own scales ---

constexpr int64_t kDepthOfBytes = 64, kBlocksAtOnce = 4;
constexpr int kFirstOfActivations = 4, kFirstOfWeights = 6;  // two tiles each

struct BytePanel {
  alignas(64) int8_t weights[kDepthOfBytes][4 * kTileRowBytes];
  alignas(64) float scales[kDepthOfBytes][kLaneRows];
  // Products of blocks: of those that are being added up and of the next ones.
  alignas(64) int32_t dots[2][kBlocksAtOnce][kTileRows][kLaneRows];
  // Copies where there are fewer rows than a tile has.
  alignas(64) int8_t x[kTileRows][kDepthOfBytes * kBlockColumns];
  alignas(64) float x_scales[kTileRows][kDepthOfBytes];
};

constexpr tiles::Shapes kByteShapes = [] {
  tiles::Shapes shapes;
  for (int tile = 0; tile < kFirstOfActivations; ++tile) shapes.set(tile, kTileRows, kTileRowBytes);
  for (int tile = kFirstOfActivations; tile < kFirstOfWeights; ++tile) shapes.set(tile, kTileRows, kBlockColumns);
  for (int tile = kFirstOfWeights; tile < 8; ++tile) shapes.set(tile, kBlockColumns / 4, kTileRowBytes);
  return shapes;
}();

// Four bytes of each row at a time: twice the values of columns 0, 4, 1, 5 and so on, as QuantizedRows has them.
void decode_bytes(const Tiles& tile, int64_t begin, int64_t depth, BytePanel& panel) {
  const __m512i doubled =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  for (int64_t b = 0; b < depth; ++b) {
    const Decoded decoded(tile.codes + (begin + b) * kBlockCodeBytes);
    for_each_of<4>([&](auto i) {
      const __m512i pairs = decoded.half[i / 2];
      _mm512_store_si512(panel.weights[b] + i * kTileRowBytes,
                         _mm512_permutexvar_epi8(i % 2 ? _mm512_srli_epi16(pairs, 4) : pairs, doubled));
    });
    store(panel.scales[b], scales_of(tile.scales + (begin + b) * kLaneRows));
  }
}

// Sixteen rows of activations from one block on; strides are in bytes and in floats.
struct ByteRows {
  const int8_t* values;
  const float* scales;
  int64_t stride, scale_stride;
};

template <int kBlocks>
NIBBLE_FUNCTION void multiply_blocks(const BytePanel& panel, int64_t begin, const ByteRows& x,
                            int32_t (&dots)[kBlocksAtOnce][kTileRows][kLaneRows]) {
  const int8_t *const values = x.values + begin * kBlockColumns, *const weights = panel.weights[begin];
  int32_t* const to = dots[0][0];
  const int64_t stride = x.stride;
  for_each_of<kBlocks>([=](auto b) {
    constexpr int kDots = decltype(b)::value, kA = kFirstOfActivations + kDots % 2, kB = kFirstOfWeights + kDots % 2;
    tiles::zero<kDots>();
    tiles::load<kA>(values + kDots * kBlockColumns, stride);
    tiles::load<kB>(weights + kDots * sizeof panel.weights[0], kTileRowBytes);
    tiles::multiply_bytes<kDots, kA, kB>();
  });
  for_each_of<kBlocks>([=](auto b) {
    constexpr int kDots = decltype(b)::value;
    tiles::store<kDots>(to + kDots * kTileRows * kLaneRows, kTileRowBytes);
  });
}

// The scales of sixteen rows in six registers: gcc would keep sixteen addresses in memory.
struct RowScales {
  const char* each_four[4];
  int64_t stride, three_strides;

  RowScales(const float* scales, int64_t count) : stride(count * sizeof *scales), three_strides(3 * stride) {
    for (int i = 0; i < 4; ++i) {
      each_four[i] = reinterpret_cast<const char*>(scales) + 4 * i * stride;
      asm("" : "+r"(each_four[i]));
    }
    asm("" : "+r"(three_strides));
  }
  Lanes of(int row, int64_t block) const {
    const int64_t offset = row % 4 == 3 ? three_strides : row % 4 * stride;
    float scale;
    std::memcpy(&scale, each_four[row / 4] + offset + block * sizeof scale, sizeof scale);
    return broadcast(scale);
  }
};

// As nvfp4_block_dots.h adds them. Totals stay in registers: the loop over rows is unrolled.
template <int kBlocks>
NIBBLE_FUNCTION void add_blocks(const BytePanel& panel, int64_t begin, const RowScales& x_scales,
                                const int32_t (&dots)[kBlocksAtOnce][kTileRows][kLaneRows],
                                Lanes (&total)[kTileRows]) {
  for (int b = 0; b < kBlocks; ++b) {
    const Lanes scale = load(panel.scales[begin + b]);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const Lanes dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[b][r]));
      total[r] = fma(dot * x_scales.of(r, begin + b), scale, total[r]);
    }
  }
}

void multiply_bytes(BytePanel& panel, int64_t depth, const ByteRows& x, int64_t rows, bool first, float* sums,
                    int64_t stride) {
  Lanes total[kTileRows];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) total[r] = first || r >= rows ? zero() : load(sums + r * stride);
  const RowScales x_scales(x.scales, x.scale_stride);
  const int64_t whole = depth / kBlocksAtOnce * kBlocksAtOnce;
  // The products of the next blocks are computed while these are added up.
  if (whole) multiply_blocks<kBlocksAtOnce>(panel, 0, x, panel.dots[0]);
  for (int64_t b = 0; b < whole; b += kBlocksAtOnce) {
    const int64_t next = b + kBlocksAtOnce;
    if (next < whole) multiply_blocks<kBlocksAtOnce>(panel, next, x, panel.dots[next / kBlocksAtOnce % 2]);
    add_blocks<kBlocksAtOnce>(panel, b, x_scales, panel.dots[b / kBlocksAtOnce % 2], total);
  }
  for (int64_t b = whole; b < depth; ++b) {
    multiply_blocks<1>(panel, b, x, panel.dots[0]);
    add_blocks<1>(panel, b, x_scales, panel.dots[0], total);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r)
    if (r < rows) store(sums + r * stride, total[r]);
}

void many_quantized(const Tiles& tiles, int64_t tile_count, const QuantizedRows& x, int64_t count, void* memory,
                    float* sums, int64_t stride) {
  BytePanel& panel = *static_cast<BytePanel*>(memory);
  const int64_t columns = tiles.blocks * kBlockColumns;
  tiles::configure(kByteShapes);
  for (int64_t t = 0; t < tile_count; ++t, sums += kLaneRows) {
    for (int64_t begin = 0; begin < tiles.blocks; begin += kDepthOfBytes) {
      const int64_t depth = std::min(kDepthOfBytes, tiles.blocks - begin);
      decode_bytes(tiles.from(t), begin, depth, panel);
      for (int64_t row = 0; row < count; row += kTileRows) {
        const int64_t rows = std::min<int64_t>(kTileRows, count - row), at = row * tiles.blocks + begin;
        ByteRows part{x.values + at * kBlockColumns, x.scales + at, columns, tiles.blocks};
        if (rows < kTileRows) {
          copy_rows(part.values, columns, rows, depth * kBlockColumns, panel.x, sizeof panel.x[0]);
          copy_rows(part.scales, tiles.blocks * sizeof(float), rows, depth * sizeof(float), panel.x_scales,
                    sizeof panel.x_scales[0]);
          part = {panel.x[0], panel.x_scales[0], sizeof panel.x[0], kDepthOfBytes};
        }
        multiply_bytes(panel, depth, part, rows, begin == 0, sums + row * stride, stride);
      }
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
ByteLoops with_amx(ByteLoops loops) {
  loops.panel_bytes = sizeof(BytePanel), loops.many = many_quantized;
  return loops;
}

}  // namespace nibble::cpu
#endif
