// The forms of the kernel in grouped.cuh, for host and device.
#pragma once

#include <cstdint>

#include "nvfp4_linear/warpgroup_form.h"

namespace nibble::experts {

using warpgroup::kChunk;
using warpgroup::kCodeBytes;
using warpgroup::kLanes;
using warpgroup::kScaleBytes;
using warpgroup::kTileBytes;
using warpgroup::kTokenGroup;
using warpgroup::kWarps;

constexpr uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Tokens: of a tile, all of one expert. Warps: that multiply. Split: warps that share a group's columns.
// Warpgroup: products of a warpgroup, with x ordered for them; else products of a warp.
template <bool Warpgroup, uint32_t Tokens, uint32_t Warps, uint32_t Strips, uint32_t Split, uint32_t Stages>
struct Form {
  static_assert(Warpgroup || Strips == 1);
  static_assert(!Warpgroup || Split == 1);
  static constexpr bool kWarpgroup = Warpgroup;
  static constexpr uint32_t kTokens = Tokens, kTokenGroups = Tokens / kTokenGroup, kStrips = Strips,
                            kSplit = Split, kStages = Stages;
  static constexpr uint32_t kConsumerWarps = Warps;
  static constexpr uint32_t kTiles = Warps * Strips;     // of the weight in a stage
  static constexpr uint32_t kGroups = kTiles / kSplit;   // of a unit
  static constexpr bool kMovesRegisters = Tokens * Strips > 128;
  static constexpr uint32_t kThreads = (Warps + (kMovesRegisters ? kWarps : 1)) * kLanes;
  static constexpr uint32_t kXBytes = Tokens * kChunk * 2;  // of a chunk
  static constexpr uint32_t kWeightBytes = kTiles * kTileBytes,
                            kStageBytes = kWeightBytes + kSplit * kXBytes;
  static constexpr uint32_t kSums = Tokens / 2;  // of a lane and strip
  static constexpr uint32_t kPartBytes = Split > 1 ? Warps * kTokenGroups * kLanes * 16 : 0;
  static constexpr uint32_t kBarrierBytes = (2 * Stages + 1) * 8, kUnitBytes = (Stages + 1) / 2 * 8;
  static constexpr uint32_t kSharedBytes =
      kStages * kStageBytes + 2 * kPartBytes + kBarrierBytes + kUnitBytes;
  static_assert(kSharedBytes <= warpgroup::kSharedBytes);

  // Chunks of x and of the intermediate as they lie in memory.
  static constexpr uint32_t padded(uint32_t chunks) { return quotient_up(chunks, kSplit) * kSplit; }
  // The place of two columns of a token, in words of a tile's chunk.
  static constexpr uint32_t word_of(uint32_t token, uint32_t column) {
    const uint32_t quarter = column % kChunk / 32, piece = column % 32 / 8, pair = column % 8 / 2;
    if (kWarpgroup) return ((piece * 4 + pair) * kTokens + token) * 4 + quarter;
    return ((piece * kTokens + token) * 4 + quarter) * 4 + pair;
  }
};

using Tiny = Form<false, 8, 16, 1, 4, 7>;
using Small = Form<false, 8, 16, 1, 1, 9>;
using Few = Form<false, 16, 16, 1, 1, 8>;
using Some = Form<true, 32, 16, 1, 1, 7>;
using Many = Form<true, 64, 16, 1, 1, 5>;
using Wide = Form<true, 128, 8, 2, 1, 4>;

// A tile of tokens: of `expert`, from the position `first` of the pairs in order.
struct alignas(16) Tile {
  uint32_t expert, first, count, unused;
};

}  // namespace nibble::experts
