// Rows of any float type as float32, in parallel, and the quantization of one row on the CPU.
#pragma once

#include <cmath>
#include <cstring>

#include "conversions.h"
#include "tensors.h"

namespace nibble::cpu {

template <class T>
void load(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

template <class T>
void store(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// A row rounded to the tensors' type and back.
template <class T>
void round_row(float* x, int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) x[i] = static_cast<float>(static_cast<T>(x[i]));
}

// Calls f(row) for every row, with rows shared out among torch's threads by about 16 K elements.
template <class F>
void for_rows(int64_t rows, int64_t columns, const F& f) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, 16384 / columns),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) f(row);
                              });
}

// A block's largest magnitude; NaN where it holds one, because the bits of NaN exceed those of infinity.
NIBBLE_FUNCTION float block_amax(const float* x) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::bit_cast<float>(largest);
}

// E2M1 codes of x * factor, one a byte.
NIBBLE_FUNCTION void encode_block(const float* x, float factor, uint32_t* codes) {
  for (uint32_t i = 0; i < kBlock; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i] * factor);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t code = std::bit_cast<uint32_t>(e2m1_shifted_code(std::bit_cast<float>(magnitude))) & 7;
    codes[i] = magnitude > kFloatInfinity ? 7 : (bits >> 28 & 8) | code;
  }
}

NIBBLE_FUNCTION void pack_block(const uint32_t* codes, uint8_t* packed) {
  for (uint32_t i = 0; i < kBlock / 2; ++i)
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

// A row's scales from row order to where the layout has them.
inline void place_scales(const uint8_t* row_scales, const Shape& shape, int64_t row, bool tiled,
                         uint8_t* scales) {
  if (!tiled) {
    std::memcpy(scales + row * shape.blocks(), row_scales, shape.blocks());
    return;
  }
  for (int64_t block = 0; block < shape.blocks(); ++block)
    scales[tiled_offset(row, block, shape.tiles)] = row_scales[block];
}

// Zeros in the scales that belong to no block.
inline void clear_padding(const Shape& shape, bool tiled, const Tensor& scales) {
  const bool padded = shape.rows % kTileRows || shape.blocks() % kTileBlocks;
  if (tiled && padded) std::memset(scales.mutable_data_ptr(), 0, scales.numel());
}

}  // namespace nibble::cpu
