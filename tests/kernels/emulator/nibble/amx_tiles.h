// Stands in for AMX's tiles (nibble/amx_tiles.h): what Intel's manual says of each instruction. A tile without a
// shape, or shapes that do not fit a product, end the program, as the processor would.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nibble/amx_shapes.h"

namespace nibble::cpu::tiles {

inline bool permitted() { return true; }

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Registers {
  Shapes shapes;
  bool configured = false;
  uint8_t tile[kTiles][kMostRows][kMostBytes];
};
inline Registers& registers() {
  thread_local Registers all;
  return all;
}

inline void require(bool fits, const char* what) {
  if (fits) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline void configure(const Shapes& shapes) {
  for (int tile = 0; tile < kTiles; ++tile)
    require(shapes.rows[tile] <= kMostRows && shapes.row_bytes[tile] <= kMostBytes, "a shape is too large");
  registers().shapes = shapes, registers().configured = true;
  std::memset(registers().tile, 0, sizeof registers().tile);
}
inline void release() { registers().configured = false; }

// The tile's rows and bytes, which it must have.
inline const Shapes& shapes_with(int tile) {
  const Registers& all = registers();
  require(all.configured && all.shapes.rows[tile] && all.shapes.row_bytes[tile], "a tile has no shape");
  return all.shapes;
}

template <int kTile>
inline void zero() {
  shapes_with(kTile);
  std::memset(registers().tile[kTile], 0, sizeof registers().tile[kTile]);
}

template <int kTile>
inline void load(const void* from, int64_t stride) {
  const Shapes& shapes = shapes_with(kTile);
  zero<kTile>();
  for (int row = 0; row < shapes.rows[kTile]; ++row)
    std::memcpy(registers().tile[kTile][row], static_cast<const char*>(from) + row * stride, shapes.row_bytes[kTile]);
}

template <int kTile>
inline void store(void* to, int64_t stride) {
  const Shapes& shapes = shapes_with(kTile);
  for (int row = 0; row < shapes.rows[kTile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, registers().tile[kTile][row], shapes.row_bytes[kTile]);
}

template <int kSums, int kA, int kB>
inline const Shapes& shapes_of_product() {
  static_assert(kSums != kA && kSums != kB && kA != kB, "the tiles of a product are three");
  for (int tile : {kSums, kA, kB}) shapes_with(tile);
  const Shapes& shapes = registers().shapes;
  require(shapes.rows[kSums] == shapes.rows[kA] && shapes.row_bytes[kSums] == shapes.row_bytes[kB] &&
              shapes.row_bytes[kA] == 4 * shapes.rows[kB] && shapes.row_bytes[kB] % 4 == 0,
          "the shapes of a product do not fit");
  return shapes;
}

// Element `at` of a row as type T.
template <class T>
inline T element(int tile, int row, int at) {
  T value;
  std::memcpy(&value, registers().tile[tile][row] + at * sizeof value, sizeof value);
  return value;
}
template <class T>
inline void set_element(int tile, int row, int at, T value) {
  std::memcpy(registers().tile[tile][row] + at * sizeof value, &value, sizeof value);
}

// A subnormal number is zero.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float bf16_at(int tile, int row, int at) {
  const uint32_t bits = static_cast<uint32_t>(element<uint16_t>(tile, row, at)) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return flushed(value);
}

// All even products are added by themselves, and all odd ones; then both sums, and this to what was there.
template <int kSums, int kA, int kB>
inline void multiply_bf16() {
  const Shapes& shapes = shapes_of_product<kSums, kA, kB>();
  for (int m = 0; m < shapes.rows[kSums]; ++m) {
    for (int n = 0; n < shapes.row_bytes[kSums] / 4; ++n) {
      float both[2] = {};
      for (int k = 0; k < shapes.rows[kB]; ++k)
        for (int odd = 0; odd < 2; ++odd)
          both[odd] = flushed(std::fma(bf16_at(kA, m, 2 * k + odd), bf16_at(kB, k, 2 * n + odd), both[odd]));
      const float sum = flushed(both[0] + both[1]);
      set_element(kSums, m, n, flushed(flushed(element<float>(kSums, m, n)) + sum));
    }
  }
}

}  // namespace nibble::cpu::tiles
