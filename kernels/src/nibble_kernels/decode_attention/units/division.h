// How a sequence is divided into splits, and the sizes of a kernel whose blocks share a split. For host and
// device.
#pragma once

#include "decode_attention/problem.h"

namespace nibble::attention::units {

// Splits of a sequence: one up to `undivided` tokens, then as many as have `least_chunk` tokens at most, up
// to `most_splits`. Depends on this sequence alone, so that its result does not depend on others.
NIBBLE_FUNCTION uint32_t splits_of(const Problem& p, uint32_t tiles) {
  if (tiles * kTile <= p.undivided) return 1;
  const uint32_t splits = quotient_up(tiles * kTile, p.least_chunk);
  return splits < p.most_splits ? splits : p.most_splits;
}

// The first tile of a split; splits differ by a tile at most.
NIBBLE_FUNCTION uint32_t first_tile(uint32_t tiles, uint32_t splits, uint32_t split) {
  return tiles * split / splits;
}

// Warps: those that multiply, beside the one that copies. Heads: neighbouring KV heads of a unit, which share
// its warps. RowGroups: eights of rows.
template <uint32_t HeadDim, bool IsFp8, uint32_t RowGroups, uint32_t Warps, uint32_t Blocks, uint32_t Heads,
          bool IsSmall>
struct Form {
  static constexpr uint32_t kHeadDim = HeadDim, kRowGroups = RowGroups, kWarps = Warps, kBlocks = Blocks;
  static constexpr uint32_t kHeads = Heads, kWarpsOfHead = Warps / Heads;
  static constexpr bool kIsFp8 = IsFp8, kIsSmall = IsSmall, kComputes = true;
  static constexpr uint32_t kElement = IsFp8 ? 1 : 2, kPerUnit = 16 / kElement;  // of 16 bytes
  static constexpr uint32_t kRowBytes = 2 * HeadDim * kElement, kTileBytes = kTile * kRowBytes;
  static constexpr uint32_t kChunks = kRowBytes / 128, kChunkBytes = kTile * 128;
  static constexpr uint32_t kConsumers = Warps * kLanes, kThreads = kConsumers + kLanes;
  static constexpr uint32_t kSteps = HeadDim / 16;     // of the product of queries and keys
  static constexpr uint32_t kDimTiles = HeadDim / 16;  // of the product of weights and values
  static constexpr uint32_t kLoad = HeadDim * kElement / 8 < 16 ? 8 : 16;  // bytes of a value at a time
  static constexpr uint32_t kLoads = HeadDim * kElement / 8 / kLoad, kPerLoad = kLoad / kElement;
  static constexpr uint32_t kUnits = 8;  // that the copying warp may be ahead
  static constexpr uint32_t kStageBytes = Heads * kTileBytes;
  static constexpr uint32_t kSumBytes = Warps * 8 * HeadDim * 4;
  static constexpr uint32_t kSharedBytes = IsSmall ? 99 * 1024 : (228 / Blocks - 1) * 1024;
  static constexpr uint32_t kOtherBytes = 2048;
  static constexpr uint32_t kStages = (kSharedBytes - kSumBytes - kOtherBytes) / kStageBytes;
  static_assert(kStages >= kWarpsOfHead);
};

// Reads all, and computes nothing of it: what the copies alone take.
template <class Whole>
struct Reads : Whole {
  static constexpr bool kComputes = false;
};

}  // namespace nibble::attention::units
