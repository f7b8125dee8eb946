// Sizes of a kernel whose warpgroups multiply, and how it divides sequences. For host and device.
#pragma once

#include "decode_attention/problem.h"

namespace nibble::attention::warpgroups {

inline constexpr uint32_t kTokens = 64;  // of a tile: the rows of a warpgroup's product
inline constexpr uint32_t kGroups = kTokens / kTile;

// Equal splits of whole tiles but for the last. They depend on this sequence, its heads and blocks_each, so that its
// result does not depend on other sequences' lengths.
struct Division {
  // With few KV heads shorter splits keep more multiprocessors busy. Half of an H200's read all that its
  // memory gives, so this many blocks are enough for a long sequence. Each split is written and read again.
  static constexpr uint32_t kBlocks = 128, kLeastSplits = 8, kMostSplits = 32;
  // In a batch of few sequences, where each can have as many blocks, shorter splits still gain. Measured on an H200.
  static constexpr uint32_t kManyBlocks = 4;

  // Of a batch of up to 1, 2, 4, 8, … sequences.
  NIBBLE_FUNCTION static uint32_t blocks_each(const Problem& p, uint32_t sequences) {
    uint32_t bucket = 1;
    while (bucket < sequences) bucket *= 2;
    return kBlocks / (p.kv_heads * row_tiles_of(p) * bucket);
  }

  // In tiles of 16 tokens.
  NIBBLE_FUNCTION static uint32_t chunk_of(const Problem& p, uint32_t tiles) {
    const uint32_t pairs = p.kv_heads * row_tiles_of(p), unit = p.least_chunk / kTile;
    const uint32_t whole = (pairs < 8 ? 4 : 8) * unit, least = pairs < 4 ? whole / 2 : whole;
    const uint32_t chunk = tiles <= whole ? whole : chunk_of(tiles, least, smaller(most_splits_of(pairs), p.most_splits));
    if (p.blocks_each < kManyBlocks) return chunk;
    const uint32_t whole_of_few = (pairs < 4 ? 2 : 4) * unit, least_of_few = pairs < 4 ? unit / 2 : 2 * unit;
    if (tiles <= whole_of_few) return whole_of_few;
    const uint32_t splits = smaller(smaller(p.blocks_each, kMostSplits), p.most_splits);
    return smaller(chunk, chunk_of(tiles, least_of_few, splits));
  }
  NIBBLE_FUNCTION static uint32_t splits_of(const Problem& p, uint32_t tiles) {
    return attention::splits_of(tiles, chunk_of(p, tiles));
  }
  NIBBLE_FUNCTION static uint32_t first_tile(const Problem& p, uint32_t tiles, uint32_t, uint32_t split) {
    const uint32_t first = split * chunk_of(p, tiles);
    return smaller(first, tiles);
  }

 private:
  NIBBLE_FUNCTION static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
  NIBBLE_FUNCTION static uint32_t chunk_of(uint32_t tiles, uint32_t least, uint32_t most_splits) {
    const uint32_t equal = quotient_up(tiles, most_splits);
    return quotient_up(least < equal ? equal : least, kGroups) * kGroups;
  }
  NIBBLE_FUNCTION static uint32_t most_splits_of(uint32_t pairs) {
    const uint32_t splits = kBlocks / pairs;
    return splits < kLeastSplits ? kLeastSplits : smaller(splits, kMostSplits);
  }
};

NIBBLE_FUNCTION constexpr bool has_form(uint32_t head_dim) { return head_dim == 128 || head_dim == 256; }

// RowGroups: eights of rows. A block has warpgroups that multiply, and four more warps: one copies, one loads
// queries, and two add up.
template <uint32_t HeadDim, bool IsFp8, uint32_t RowGroups>
struct Form {
  static constexpr uint32_t kHeadDim = HeadDim, kRowGroups = RowGroups, kColumns = 8 * RowGroups;
  static constexpr bool kIsFp8 = IsFp8;
  static constexpr uint32_t kElement = IsFp8 ? 1 : 2;
  static constexpr uint32_t kRowBytes = 2 * HeadDim * kElement, kChunks = kRowBytes / 128;
  // Of a copy: products that read bfloat16 where the copies put it need the same distance between all eights
  // of tokens.
  static constexpr uint32_t kPieceTokens = IsFp8 ? kTile : 8, kChunkBytes = kPieceTokens * 128;
  static constexpr uint32_t kTileBytes = kTokens * kRowBytes, kPieceBytes = kPieceTokens * kRowBytes;
  static constexpr uint32_t kSteps = HeadDim / 16;     // of the product of queries and keys
  static constexpr uint32_t kDimTiles = HeadDim / 64;  // of the product of weights and values

  // Warpgroups that multiply, with a tile in turn. FP8 keeps one busy for longer, and has smaller tiles.
  static constexpr uint32_t kWorkers = HeadDim == 256 ? 2 : IsFp8 && RowGroups == 1 ? 4 : 3;
  static constexpr uint32_t kWarps = 4, kAdders = 2;  // of a warpgroup; of a block
  static constexpr uint32_t kThreads = (kWorkers * kWarps + 2 + kAdders) * kLanes;

  // What a block has of a unit's partial results: rows of each worker that has tiles of it, each with its
  // reference and its sum of weights behind the elements.
  static constexpr uint32_t kPartFloats = HeadDim + 4;
  static constexpr uint32_t part_bytes(uint32_t rows) { return kWorkers * rows * kPartFloats * 4; }
  static constexpr uint32_t kMostBuffers = 4;
  static constexpr uint32_t kUnits = 4;  // that the copying warp may be ahead

  static constexpr uint32_t kSharedBytes = 227 * 1024;
  static constexpr uint32_t kQueryBytes = HeadDim * kColumns * 2, kWeightBytes = kTokens * kColumns * 2;
  static constexpr uint32_t kOtherBytes = kUnits * kQueryBytes + kWorkers * 2 * kWeightBytes + 3072;
  // Each is of one worker: who waits for a copy into a stage has seen the one before it.
  static constexpr uint32_t kStages =
      (kSharedBytes - kOtherBytes - part_bytes(kColumns)) / kTileBytes / kWorkers * kWorkers;
  // A tile is free once the next one of its warpgroup is being multiplied; else at once, if there is room for
  // one only.
  static constexpr bool kFreesLate = !IsFp8 && kStages >= 2 * kWorkers;
  static constexpr uint32_t kPartBytes = kSharedBytes - kOtherBytes - kStages * kTileBytes;
  static_assert(kStages >= kWorkers && kPartBytes >= part_bytes(kColumns));
};

}  // namespace nibble::attention::warpgroups
