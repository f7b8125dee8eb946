// How a sequence is divided into splits, and the sizes of a kernel whose clusters share a split. For host and
// device.
#pragma once

#include "decode_attention/problem.h"

namespace nibble::attention::clusters {

// Splits of a sequence, at most `most_splits`, which differ by a tile at most. Depends on this sequence and
// the GPU alone, so that its result does not depend on other sequences.
struct Division {
  NIBBLE_FUNCTION static uint32_t splits_of(const Problem& p, uint32_t tiles) {
    if (tiles * kTile <= p.most_whole) return 1;
    const uint32_t splits = p.sharing / (p.kv_heads * row_tiles_of(p));
    return splits == 0 ? 1 : splits < p.most_splits ? splits : p.most_splits;
  }
  NIBBLE_FUNCTION static uint32_t first_tile(const Problem&, uint32_t tiles, uint32_t splits,
                                             uint32_t split) {
    return tiles * split / splits;
  }
};

// Whether there is a kernel for this head dim and number of rows: with more, two blocks of a multiprocessor
// have too few registers for sums and queries.
NIBBLE_FUNCTION constexpr bool has_form(uint32_t head_dim, uint32_t rows) {
  return head_dim * quotient_up(rows, 8) <= 128;
}

// RowGroups: eights of rows. A block's warps: those that multiply, those that add, and one that copies.
template <uint32_t HeadDim, bool IsFp8, uint32_t RowGroups>
struct Form {
  static constexpr uint32_t kHeadDim = HeadDim, kRowGroups = RowGroups, kRanks = attention::kRanks;
  static constexpr bool kIsFp8 = IsFp8;
  static constexpr uint32_t kElement = IsFp8 ? 1 : 2, kPerUnit = 16 / kElement;  // of 16 bytes
  static constexpr uint32_t kRowBytes = 2 * HeadDim * kElement, kTileBytes = kTile * kRowBytes;
  static constexpr uint32_t kChunks = kRowBytes / 128;
  static constexpr uint32_t kSteps = HeadDim / 16;     // of the product of queries and keys
  static constexpr uint32_t kDimTiles = HeadDim / 16;  // of the product of weights and values
  static constexpr uint32_t kLoad = HeadDim * kElement / 8 < 16 ? 8 : 16;  // bytes of a value at a time
  static constexpr uint32_t kLoads = HeadDim * kElement / 8 / kLoad, kPerLoad = kLoad / kElement;

  // A cluster alone computes up to this many of `least_chunk` tokens of a sequence.
  static constexpr uint32_t kWholeChunks = IsFp8 ? 40 : 24;

  static constexpr uint32_t kWarps = 4, kAdders = 3;
  static constexpr uint32_t kThreads = (kWarps + kAdders + 1) * kLanes;
  static constexpr uint32_t kBlocks = 2;  // on a multiprocessor
  static constexpr uint32_t kSharedBytes = (228 / kBlocks - 1) * 1024;

  // Partial results of a unit: one of each warp of the cluster that has tiles of it.
  static constexpr uint32_t kSlots = kRanks * kWarps;
  static constexpr uint32_t kQuads = HeadDim / 4, kSliceQuads = kQuads / kRanks;  // of four elements of a row
  static_assert(kSlots % kLanes == 0 && kSliceQuads >= 1);

  // What a block receives of a unit's partial results, its slice of each row: rows of slots of quads, then
  // pairs of rows of slots of two maxima and two sums.
  static constexpr uint32_t received_quads(uint32_t rows) {
    return kSlots * (rows * kSliceQuads + (rows + 1) / 2);
  }
  static constexpr uint32_t kReceivedBytes = received_quads(8 * RowGroups) * 16;
  static constexpr uint32_t kMostBuffers = 4;
  static constexpr uint32_t kUnits = 8;  // that the copying warp may be ahead
  static constexpr uint32_t kOtherBytes = 2048;
  // Each is of one warp: who waits for a copy into a stage has seen the one before it.
  static constexpr uint32_t kStages =
      (kSharedBytes - kReceivedBytes - kOtherBytes) / kTileBytes / kWarps * kWarps;
  static_assert(kStages >= kWarps);
};

}  // namespace nibble::attention::clusters
