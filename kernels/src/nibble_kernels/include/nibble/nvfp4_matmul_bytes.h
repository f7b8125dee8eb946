// The products of quantized activations (nvfp4_matmul.h), for the instructions of the file that includes this
// one. That file defines, in its unnamed namespace, Lanes as for nvfp4_matmul_floats.h and
//
//   Bytes                               four codes of each of 16 rows, doubled + 12
//   bytes_of<i>(codes)                  the i-th of a block
//   store_bytes(p, w), load_bytes(p)
//   add_block_of_bytes(weights, scale, x, block, blocks, total)
//                                       adds a block's products, times both scales, to the totals of some rows
//                                       and tiles; weights(t, i) are the i-th bytes of a tile, i a constant
//   kFewOfBytes, kTilesOfBytes, kRowsOfBytes, kDepthOfBytes (blocks of a panel)
//
// A block's product with both scales is exact, 12 bits, 4 and 4, so that sums have the same bits on every level.

#include "nibble/nvfp4_matmul_loops.h"

template <int kCount>
void few_quantized_rows(const Tiles& tile, const QuantizedRows& x, float* sums, int64_t stride) {
  const uint8_t *codes = tile.codes, *scales = tile.scales;
  Lanes total[kCount][1];
  for (int m = 0; m < kCount; ++m) total[m][0] = zero();
  for (int64_t b = 0; b < tile.blocks; ++b) {
    fetch(codes, scales, b);
    const Lanes scale[1] = {scales_of(scales)};
    add_block_of_bytes([&](int, auto i) { return bytes_of<decltype(i)::value>(codes); }, scale, x, b, tile.blocks,
                       total);
    codes += kBlockCodeBytes, scales += kLaneRows;
  }
  for (int m = 0; m < kCount; ++m) store(sums + m * stride, total[m][0]);
}

void few_quantized(const Tiles& tile, const QuantizedRows& x, int64_t count, float* sums, int64_t stride) {
  with_count<kFewOfBytes>(count,
                         [&](auto n) { few_quantized_rows<decltype(n)::value>(tile, x, sums, stride); });
}

constexpr int kBytesBytes = 4 * 64;  // of a block and tile in the panel, then come its scales as floats
constexpr int kBlockBytes = kBytesBytes + 64;

template <int kTiles, int kRows>
void multiply_bytes_panel(const char* panel, int64_t depth, const QuantizedRows& x, int64_t blocks, bool first,
                          float* sums, int64_t stride) {
  Lanes total[kRows][kTiles];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      total[r][t] = first ? zero() : load(sums + r * stride + t * kLaneRows);
  for (int64_t b = 0; b < depth; ++b) {
    const auto from = [&](int t) { return panel + (b * kTilesOfBytes + t) * kBlockBytes; };
    Lanes scale[kTiles];
    for (int t = 0; t < kTiles; ++t) scale[t] = load(reinterpret_cast<const float*>(from(t) + kBytesBytes));
    add_block_of_bytes([&](int t, int i) { return load_bytes(from(t) + i * 64); }, scale, x, b, blocks, total);
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t) store(sums + r * stride + t * kLaneRows, total[r][t]);
}

inline void decode_bytes(const uint8_t* codes, const uint8_t* scales, char* to) {
  for_each_of<4>([&](auto i) { store_bytes(to + i * 64, bytes_of<decltype(i)::value>(codes)); });
  store(reinterpret_cast<float*>(to + kBytesBytes), scales_of(scales));
}

template <int kTiles>
void many_quantized_tiles(const Tiles& tiles, const QuantizedRows& x, int64_t count, char* panel, float* sums,
                          int64_t stride) {
  for (int64_t begin = 0; begin < tiles.blocks; begin += kDepthOfBytes) {
    const int64_t depth = tiles.blocks - begin < kDepthOfBytes ? tiles.blocks - begin : kDepthOfBytes;
    for (int t = 0; t < kTiles; ++t) {
      const Tiles tile = tiles.from(t);
      for (int64_t b = 0; b < depth; ++b)
        decode_bytes(tile.codes + (begin + b) * kBlockCodeBytes, tile.scales + (begin + b) * kLaneRows,
                     panel + (b * kTilesOfBytes + t) * kBlockBytes);
    }
    for (int64_t row = 0; row < count; row += kRowsOfBytes) {
      const int64_t at = row * tiles.blocks + begin;
      const QuantizedRows part{x.values + at * kBlockColumns, x.scales + at, x.offsets + at, x.scaled_offsets + at};
      with_count<kRowsOfBytes>(count - row < kRowsOfBytes ? count - row : kRowsOfBytes, [&](auto n) {
        multiply_bytes_panel<kTiles, decltype(n)::value>(panel, depth, part, tiles.blocks, begin == 0,
                                                         sums + row * stride, stride);
      });
    }
  }
}

void many_quantized(const Tiles& tiles, int64_t tile_count, const QuantizedRows& x, int64_t count, void* panel,
                    float* sums, int64_t stride) {
  for (int64_t tile = 0; tile < tile_count; tile += kTilesOfBytes) {
    with_count<kTilesOfBytes>(
        tile_count - tile < kTilesOfBytes ? tile_count - tile : kTilesOfBytes, [&](auto n) {
          many_quantized_tiles<decltype(n)::value>(tiles.from(tile), x, count, static_cast<char*>(panel),
                                                   sums + tile * kLaneRows, stride);
        });
  }
}

constexpr ByteLoops kByteLoops = {kFewOfBytes, kDepthOfBytes * kTilesOfBytes * kBlockBytes, few_quantized,
                                  many_quantized};
