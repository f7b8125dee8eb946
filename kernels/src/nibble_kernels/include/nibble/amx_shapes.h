// Shapes of AMX's tiles, for the instructions and for their stand-in.
#pragma once

#include <cstdint>

namespace nibble::cpu::tiles {

// What ldtilecfg reads.
struct alignas(64) Shapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, uint8_t count, uint16_t bytes) { rows[tile] = count, row_bytes[tile] = bytes; }
};
static_assert(sizeof(Shapes) == 64);

}  // namespace nibble::cpu::tiles
