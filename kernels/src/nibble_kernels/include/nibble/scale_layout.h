// Where the scale of (row, block) lies: row by row, or in the 128x4 tiles that FP4 tensor cores read
// (formats.md 6.4).
#pragma once

#include "arch.h"

namespace nibble {

constexpr uint32_t kBlock = 16;  // elements under one scale
constexpr uint32_t kTileRows = 128;
constexpr uint32_t kTileBlocks = 4;

template <class Int>
NIBBLE_FUNCTION Int round_up(Int value, Int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// `tiles` is how many tiles lie side by side: the row's blocks / 4, rounded up.
NIBBLE_FUNCTION uint64_t tiled_offset(uint32_t row, uint32_t block, uint32_t tiles) {
  const uint32_t tile = row / kTileRows * tiles + block / kTileBlocks;
  return uint64_t{tile} * (kTileRows * kTileBlocks) +
         (row % 32 * 16 + row / 32 % 4 * 4 + block % kTileBlocks);
}

}  // namespace nibble
