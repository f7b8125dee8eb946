// Products of activations with packed NVFP4 weights on the CPU. No torch here: nvfp4_linear and nvfp4_moe
// bring tensors, threads and what follows the sums.
//
// A packed weight is a sequence of tiles of 16 weight rows. A tile is a sequence of blocks of 16 columns: 128
// bytes of codes and, in another array, 16 E4M3 scales. So a register of 16 lanes has one weight row a lane,
// and no sum crosses lanes. The codes of a block are two halves of 8 columns; a half has 4 bytes of each row,
// the codes of its even columns in the low two bytes and of its odd columns in the high two, in order from
// the lowest bits.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "scale_layout.h"

namespace nibble::cpu {

constexpr int64_t kLaneRows = 16;  // weight rows of a tile
constexpr int64_t kBlockColumns = kBlock;
constexpr int64_t kBlockCodeBytes = kLaneRows * kBlockColumns / 2;
// Up to so many rows of activations the weights are decoded in registers; above, in panels that every row
// uses.
constexpr int64_t kFewRows = 8;
// Rows of activations that are multiplied at once: what they have for a panel's columns stays in the cache.
constexpr int64_t kManyRows = 512;
// Tiles that one panel decodes at most.
constexpr int64_t kPanelTiles = 4;

// A weight in the layout of checkpoints: codes [rows, columns / 2], even column low, E4M3 scales
// [rows, columns / 16].
struct StoredWeight {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows;
  int64_t columns;
};

// Consecutive tiles of a packed weight.
struct Tiles {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t blocks;

  Tiles from(int64_t tile) const {
    return {codes + tile * blocks * kBlockCodeBytes, scales + tile * blocks * kLaneRows, blocks};
  }
};

// Packs the rows [row, row + 16) of a weight as one tile; rows that the weight does not have become zero.
// Returns the rows of which a scale is NaN, a bit each: products do not see them.
uint32_t pack_tile(const StoredWeight& weight, int64_t row, uint8_t* codes, uint8_t* scales);
// And back, into the codes and scales of a weight of `rows` rows.
void unpack_tile(const Tiles& tile, int64_t row, int64_t rows, uint8_t* codes, uint8_t* scales);

// What the activations of one set of instructions are.
enum class Operand { kBfloat16, kFloat };

// A block's scale and offset for 16-bit sums: where d is a block's dot product without its offset, the bits
// d * multiplier + start are the float base + (d + offset) * scale, exactly.
struct ScaledOffset {
  int32_t multiplier;  // an E4M3 number's significand, as two words
  int32_t start;
  float base;  // 1.5 * 2^23 times the significand's unit; NaN if the scale is
};

// Rows of quantized activations: twice their E2M1 values, in a block in the order of decoded codes (columns 0,
// 4, 1, 5, 2, 6, 3, 7 and so on), their block scales times 2^6, and -12 times each block's sum, which makes up
// for weights that are decoded as twice their value + 12; and both once more, in one.
struct QuantizedRows {
  const int8_t* values;  // [row][columns]
  const float* scales;   // [row][blocks]
  const int32_t* offsets;
  const ScaledOffset* scaled_offsets;
};

// A value that a word does not hold. All tiles need a row's rests, so they have the place of the column's weights.
struct Rest {
  int32_t block;
  int32_t codes;  // from the start of a tile: bytes to the codes of eight columns of its 16 rows, 4 bytes a row
  int16_t shift;  // bits below the column's code in those of a row
  int16_t pair;   // of the block's eight in a panel: twice its number, plus 1 for the second of its columns
  float value;    // what the word lacks, times kRestFactor
};

// Of a block's digits: 2^8 times the scale of its words, and -12 times the sum of its words times their scale / 2^8.
struct DigitScale {
  float scale;
  float correction;
};

// Rows of activations as integers of 16 bits with a scale for each block, a power of two. Words times scales and
// the rests, in the order of columns, add up to x, exactly.
struct WordRows {
  const int16_t* words;         // [row][columns]
  const float* scales;          // [row][blocks]
  const Rest* const* rests;     // [row]
  const int32_t* first_rests;   // [row][blocks + 1]: of each block
  // Of a single row, or null: each word as 256 times a byte plus a byte, for each block 16 high ones and 16 low ones,
  // in the order of decoded codes.
  const int8_t* digits;
  const DigitScale* digit_scales;  // [blocks]
  const uint8_t* has_tiny;         // [row]: whether a scale is below kLeastWordScale
};
// From here on, a scale's product with a weight's is a normal number, as is that of any larger one.
constexpr float kLeastWordScale = 0x1p-100f;
// Words of weights are 2^9 times their values and columns of them 2^25 times, scales 2^-8 times theirs.
constexpr float kWordFactor = 0x1p-1f;
constexpr float kRestFactor = 0x1p-17f;

// The loops write sums as [activation row][stride], a tile's 16 rows side by side; x is [count][columns].
// `few` multiplies one tile with few_rows rows at most; `many` up to kPanelTiles tiles with any number of
// rows, and needs panel_bytes of memory aligned to 64 bytes.
struct FloatLoops {
  Operand operand;
  float factor;  // a power of two that multiplies x where the operand is a float
  int64_t few_rows;
  int64_t panel_bytes;
  void (*few)(const Tiles& tile, const void* x, int64_t count, float* sums, int64_t stride);
  void (*many)(const Tiles& tiles, int64_t tile_count, const void* x, int64_t count, void* panel, float* sums,
               int64_t stride);
};

struct ByteLoops {
  int64_t few_rows;
  int64_t panel_bytes;
  void (*few)(const Tiles& tile, const QuantizedRows& x, int64_t count, float* sums, int64_t stride);
  void (*many)(const Tiles& tiles, int64_t tile_count, const QuantizedRows& x, int64_t count, void* panel,
               float* sums, int64_t stride);
};

struct WordLoops {
  int64_t few_rows;
  int64_t panel_bytes;
  void (*few)(const Tiles& tile, const WordRows& x, int64_t count, float* sums, int64_t stride);
  void (*many)(const Tiles& tiles, int64_t tile_count, const WordRows& x, int64_t count, void* panel, float* sums,
               int64_t stride);
  bool digits;  // whether `few` is faster with digits, for a single row
};

// What a processor multiplies with. Where there are words, floats are for rows that are not finite.
struct MatmulLevel {
  int64_t number;  // in __init__.py's LEVELS
  const FloatLoops* floats;
  const ByteLoops* bytes;
  const WordLoops* words;
};

// The best level that this processor has, or the one chosen by use_matmul_level.
const MatmulLevel& matmul_level();
// Every level compiled in that this processor has, best first.
const std::vector<const MatmulLevel*>& matmul_levels();
// Which of them is used from now on.
void use_matmul_level(int64_t index);

}  // namespace nibble::cpu
