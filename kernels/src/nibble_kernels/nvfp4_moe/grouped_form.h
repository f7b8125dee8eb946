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

constexpr uint32_t kSlots = 4;  // tiles whose intermediate is written and not yet known to be

constexpr uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Tokens: of a tile, all of one expert. Warps: that multiply. Blocks: of a multiprocessor; one multiplies while
// another writes. Warpgroup: products of a warpgroup, with x ordered for them; else products of a warp.
template <bool Warpgroup, uint32_t Tokens, uint32_t Warps, uint32_t Strips, uint32_t Stages, uint32_t Blocks>
struct Form {
  static_assert(Warpgroup || Strips == 1);
  static constexpr bool kWarpgroup = Warpgroup;
  static constexpr uint32_t kTokens = Tokens, kTokenGroups = Tokens / kTokenGroup, kStrips = Strips,
                            kStages = Stages, kBlocks = Blocks;
  static constexpr uint32_t kConsumerWarps = Warps;
  static constexpr uint32_t kGroups = Warps * Strips;  // of a unit
  static constexpr bool kMovesRegisters = Tokens * Strips > 128;
  static constexpr uint32_t kThreads = (Warps + (kMovesRegisters ? kWarps : 2)) * kLanes;
  static constexpr uint32_t kXBytes = Tokens * kChunk * 2;  // of a chunk
  static constexpr uint32_t kWeightBytes = kGroups * kTileBytes,
                            kStageBytes = kWeightBytes + kXBytes;
  static constexpr uint32_t kSums = Tokens / 2;  // of a lane and strip
  static constexpr uint32_t kUnitBytes = Stages * 16, kBarrierBytes = (2 * Stages + 2 * kSlots) * 8,
                            kSlotBytes = kSlots * 4;
  static constexpr uint32_t kSharedBytes =
      kStages * kStageBytes + kUnitBytes + kBarrierBytes + kSlotBytes;
  static_assert((kSharedBytes + 1024) * Blocks <= warpgroup::kSharedBytes + 1024);

  // The place of two columns of a token, in words of a tile's chunk.
  static constexpr uint32_t word_of(uint32_t token, uint32_t column) {
    const uint32_t quarter = column % kChunk / 32, piece = column % 32 / 8, pair = column % 8 / 2;
    if (kWarpgroup) return ((piece * 4 + pair) * kTokens + token) * 4 + quarter;
    return ((piece * kTokens + token) * 4 + quarter) * 4 + pair;
  }
};

// By their tokens.
using Form8 = Form<false, 8, 8, 1, 9, 2>;
using Form16 = Form<false, 16, 8, 1, 8, 2>;
using Form32 = Form<true, 32, 8, 1, 6, 2>;
using Form64 = Form<true, 64, 8, 1, 4, 2>;
using Form128 = Form<true, 128, 8, 2, 4, 1>;

// A tile of tokens: of `expert`, from the position `first` of the pairs in order.
struct alignas(16) Tile {
  uint32_t expert, first, count, unused;
};

}  // namespace nibble::experts
