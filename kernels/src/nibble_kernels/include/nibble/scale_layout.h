// Where the scale of (row, block) lies: row by row, or in the 128x4 tiles that FP4 tensor cores read (formats.md 6.4).
#pragma once

#include "arch.h"

namespace nibble {

constexpr int kBlock = 16;  // elements under one scale
constexpr int kTileRows = 128;
constexpr int kTileBlocks = 4;

template <class Int>
NIBBLE_FUNCTION Int round_up(Int value, Int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// `tiles` is how many tiles lie side by side: the row's blocks / 4, rounded up.
NIBBLE_FUNCTION int64_t tiled_offset(int64_t row, int64_t block, int64_t tiles) {
  return (row / kTileRows * tiles + block / kTileBlocks) * (kTileRows * kTileBlocks) + row % 32 * 16 + row / 32 % 4 * 4 +
         block % kTileBlocks;
}

}  // namespace nibble
