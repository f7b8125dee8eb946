// The forms of the kernel in warpgroup.cuh, for host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvfp4_linear/norm_beside.h"

namespace nibble::warpgroup {

constexpr uint32_t kChunk = 128;  // columns of a tile of the weight
constexpr uint32_t kLanes = 32;
constexpr uint32_t kWarps = 4;       // of a warpgroup
constexpr uint32_t kTokenGroup = 8;  // tokens whose sums a warp has side by side
constexpr uint32_t kCodeBytes = 1024, kScaleBytes = 128, kTileBytes = kCodeBytes + kScaleBytes;
constexpr uint32_t kMostRanks = 8;             // blocks of a cluster, on every device
constexpr uint32_t kSharedBytes = 227 * 1024;  // of a thread block, on SM90

constexpr uint32_t kMostNormTokens = 64;       // of a product with an RMSNorm before or after it

constexpr uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// x in order: [tiles of tokens, chunks, kChunkPieces, tokens of a tile] pieces of 16 bytes. Piece 4 p + i of a
// chunk has the columns (8 p + 2 i, 8 p + 2 i + 1) of each quarter of 32, one quarter after the other.
constexpr uint32_t kChunkPieces = kChunk / 8, kQuarter = kChunk / 4;
constexpr size_t piece_place(uint32_t token, uint32_t chunk, uint32_t piece, uint32_t tile, uint32_t chunks) {
  return ((size_t{token / tile} * chunks + chunk) * kChunkPieces + piece) * tile + token % tile;
}
// Of an even column and the next one, in elements.
constexpr size_t pair_place(uint32_t token, uint32_t column, uint32_t tile, uint32_t chunks) {
  const uint32_t piece = column % kQuarter / 2;
  return piece_place(token, column / kChunk, piece, tile, chunks) * 8 + column % kChunk / kQuarter * 2;
}

// A unit is a block's rows by a tile of tokens. Blocks have whole units; or those of a cluster share a unit's
// columns; or all chunks of all units are divided into equal ranges, one for each block.
enum class Sharing { units, clusters, ranges };

// Tokens: columns of a product. Strips: of a warpgroup. Stages: chunks under way. OrdersX: warps of the block bring
// x into order; else it comes in order.
template <uint32_t Tokens, uint32_t Warpgroups, uint32_t Strips, uint32_t Stages, Sharing Shares, bool OrdersX,
          Norm Beside = Norm::none>
struct Form {
  static constexpr uint32_t kTokens = Tokens, kStrips = Strips, kStages = Stages;
  static constexpr bool kRanges = Shares == Sharing::ranges, kSplits = Shares == Sharing::clusters;
  static constexpr uint32_t kConsumerWarps = Warpgroups * kWarps;
  static constexpr uint32_t kGroups = kConsumerWarps * Strips;  // of a thread block
  static constexpr uint32_t kTokenGroups = Tokens / kTokenGroup;
  // Warps that order x have 8 tokens each; the first one also fetches weights.
  static constexpr bool kOrdersX = OrdersX;
  static constexpr uint32_t kXWarps = kOrdersX ? kTokenGroups : 0;
  // Many sums need more registers than 384 threads have each: the fetching warpgroup gives some away.
  static constexpr bool kMovesRegisters =
      Warpgroups <= 2 && (Tokens * Strips > 128 || (Tokens == 128 && kRanges));
  // With a norm before it a warpgroup finds the factors. With one after it each warp has its sums of squares.
  static constexpr Norm kNorm = Beside;
  static_assert(kNorm == Norm::none || Tokens <= kMostNormTokens);
  static constexpr uint32_t kNormWarps = kNorm == Norm::before ? kWarps : 0;
  static_assert(kNormWarps == 0 || (!kOrdersX && !kMovesRegisters));
  static constexpr uint32_t kFetchWarp = kConsumerWarps + kNormWarps;  // of which the first thread fetches
  static constexpr uint32_t kThreads =
      (kFetchWarp + (kMovesRegisters ? kWarps : kOrdersX ? kXWarps : 1)) * kLanes;
  static constexpr uint32_t kXBytes = Tokens * kChunk * 2;
  static constexpr uint32_t kWeightBytes = kGroups * kTileBytes, kStageBytes = kWeightBytes + kXBytes;
  static constexpr uint32_t kSums = Tokens / 2;                              // of a thread and strip
  static constexpr uint32_t kSlots = Strips * kTokenGroups * kConsumerWarps;  // of 32 float4
  static constexpr uint32_t kSlotBytes = kLanes * 16;
  static constexpr uint32_t kBarrierBytes = (2 * Stages + 4) * 8;
  static constexpr uint32_t kNormFloats =
      kNorm == Norm::none ? 0 : (kNorm == Norm::before ? 1 + kWarps : kConsumerWarps) * Tokens;
  static constexpr uint32_t shared_bytes(uint32_t ranks) {
    return kStages * kStageBytes + kBarrierBytes + kNormFloats * 4 +
           (ranks > 1 ? quotient_up(kSlots, ranks) * ranks * kSlotBytes : 0);
  }
  // Clusters of every size.
  static constexpr bool fits() {
    for (uint32_t ranks = 2; ranks <= kMostRanks; ++ranks) {
      if (shared_bytes(ranks) > kSharedBytes) return false;
    }
    return true;
  }
};

}  // namespace nibble::warpgroup
