// The forms of the kernel in grouped.cuh, for host and device.
#pragma once

#include <algorithm>
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

// Tokens: of a tile, all of one expert. Warps: that multiply. Blocks: of a multiprocessor; one multiplies
// while another writes. Warpgroup: products of a warpgroup, with x ordered for them; else products of a warp.
// Gathers: x and the intermediate stay in rows, whose chunks are copied one by one (few.cuh); products of a
// warp. Parts: of a unit's columns, each of which some warps have. Chunks: of a warp in a stage.
template <bool Warpgroup, uint32_t Tokens, uint32_t Warps, uint32_t Strips, uint32_t Stages, uint32_t Blocks,
          bool Gathers = false, uint32_t Parts = 1, uint32_t Chunks = 1>
struct Form {
  static_assert(Warpgroup || Strips == 1);
  static_assert(!Gathers || (!Warpgroup && Tokens == 8 && Parts * Chunks <= 2));
  static_assert(Gathers || Parts * Chunks == 1);
  static constexpr uint32_t kParts = Parts, kChunks = Chunks, kStageChunks = Parts * Chunks,
                            kStageColumns = kChunk * kStageChunks;
  static constexpr bool kGathers = Gathers;
  static constexpr bool kWarpgroup = Warpgroup;
  static constexpr uint32_t kTokens = Tokens, kTokenGroups = Tokens / kTokenGroup, kStrips = Strips,
                            kStages = Stages, kBlocks = Blocks;
  static constexpr uint32_t kConsumerWarps = Warps;
  static constexpr uint32_t kGroups = Warps * Strips / Parts;  // of a unit
  static constexpr bool kMovesRegisters = Tokens * Strips > 128;
  static constexpr uint32_t kThreads = (Warps + (kMovesRegisters ? kWarps : 2)) * kLanes;
  // Of a token's chunk: rows of two tokens begin in different banks.
  static constexpr uint32_t kRowBytes = kStageColumns * 2 + (Gathers ? 16 : 0);
  static constexpr uint32_t kXBytes = Tokens * kRowBytes;  // of a stage
  static constexpr uint32_t kXChunkBytes = Tokens * kChunk * 2;
  static constexpr uint32_t kWeightBytes = kGroups * kStageChunks * kTileBytes,
                            kStageBytes = kWeightBytes + kXBytes;
  static constexpr uint32_t kSums = Tokens / 2;  // of a lane and strip
  static constexpr uint32_t kUnitBytes = Stages * 16, kBarrierBytes = (2 * Stages + 2 * kSlots) * 8,
                            kSlotBytes = kSlots * 4;
  // Sums of the second part's warps, of two units.
  static constexpr uint32_t kJoinBytes = Parts == 1 ? 0 : 2 * kGroups * kLanes * 16 + 4 * 8;
  static constexpr uint32_t kSharedBytes =
      kStages * kStageBytes + kUnitBytes + kBarrierBytes + kSlotBytes + kJoinBytes;
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
// For few pairs, by a unit's groups. With the fewest pairs there are fewer units of 8 groups than blocks.
using FewForm4 = Form<false, 8, 8, 1, 7, 2, true, 2>;
using FewForm8 = Form<false, 8, 8, 1, 4, 2, true, 1, 2>;

// A tile of tokens: of `expert`, from the position `first` of the pairs in order.
struct alignas(16) Tile {
  uint32_t expert, first, count, unused;
};

// few.cuh: its forms' numbers, the pairs up to which units of 4 groups are taken, and the most that a block
// sorts.
constexpr int64_t kFew4 = -4, kFew8 = -8;
constexpr uint32_t kMostPairsOf4 = 32;
constexpr uint32_t kMostFewPairs = 640, kMostFewTiles = kMostFewPairs, kMostFewExperts = 1024;

// Words in memory that few.cuh finds zero and leaves zero.
struct FewCounters {
  static constexpr uint32_t kLine = 32;  // the queue's, which all blocks ask
  static constexpr uint32_t kWords = kLine + kMostFewTiles;
  uint32_t *queue, *complete;

  explicit FewCounters(uint32_t* first) : queue(first), complete(first + kLine) {}
};

// Tokens of a tile, for so many pairs an expert: fitted to every form's time on an H200
// (docs/kernels/nvfp4_linear.md).
inline int64_t tokens_of(uint32_t pairs, uint32_t experts) {
  const float each = static_cast<float>(pairs) / static_cast<float>(experts);
  return each <= 4.5f ? 8 : each <= 9 ? 16 : each <= 18 ? 32 : each <= 72 ? 64 : 128;
}

inline int64_t form_of(uint32_t pairs, uint32_t experts) {
  if (pairs <= kMostPairsOf4) return kFew4;
  const int64_t tokens = tokens_of(pairs, experts);
  return tokens == 8 && pairs <= kMostFewPairs ? kFew8 : tokens;
}

// Parts of one temporary tensor.
struct Parts {
  int64_t bytes = 0;
  int64_t add(int64_t more) {
    const int64_t at = bytes;
    bytes += (more + 127) / 128 * 128;
    return at;
  }
};

// What route.cuh and grouped.cuh keep in a temporary tensor, in bytes from its beginning. `chunks`: of x;
// `inner_chunks`: of the intermediate; `outputs`: of w2, in two bytes each. nibble/plan/expert_memory.py
// counts the same.
struct Workspace {
  uint32_t most_tiles;
  Parts parts;
  int64_t x, inner, products, tiles, order, weights, complete, counters;

  template <class Form>
  static Workspace of(uint32_t pairs, uint32_t experts, uint32_t chunks, uint32_t inner_chunks,
                      uint32_t outputs) {
    Workspace w{};
    w.most_tiles = std::min(experts + pairs / Form::kTokens, pairs);
    w.x = w.parts.add(int64_t{w.most_tiles} * chunks * Form::kXChunkBytes);
    w.inner = w.parts.add(int64_t{w.most_tiles} * inner_chunks * Form::kXChunkBytes);
    w.products = w.parts.add(int64_t{pairs} * outputs * 2);
    w.tiles = w.parts.add(w.most_tiles * sizeof(Tile));
    w.order = w.parts.add(int64_t{pairs} * 4);
    w.weights = w.parts.add(int64_t{pairs} * 4);
    w.complete = w.parts.add(int64_t{w.most_tiles} * 4);
    w.counters = w.parts.add(8);
    return w;
  }
};

// The same for few.cuh, whose intermediate stays in rows.
struct FewWorkspace {
  Parts parts;
  int64_t inner, products;

  FewWorkspace(uint32_t pairs, uint32_t inner_columns, uint32_t outputs)
      : inner(parts.add(int64_t{pairs} * inner_columns * 2)),
        products(parts.add(int64_t{pairs} * outputs * 2)) {}
};

}  // namespace nibble::experts
