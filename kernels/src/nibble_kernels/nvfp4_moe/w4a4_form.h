// The forms of the experts' W4A4 kernel in w4a4.cuh and what its launches keep in memory, for host and device.
#pragma once

#include "nvfp4_linear/w4a4.cuh"
#include "nvfp4_moe/grouped_form.h"

namespace nibble::w4a4_experts {

using experts::quotient_up;
using experts::Tile;
using w4a4::kChunk;
using w4a4::kGroup;
using w4a4::kGroups;
using w4a4::kLanes;
using w4a4::kTokenGroup;
using w4a4::kXRowBytes;

constexpr uint32_t kTokenScales = kChunk / 16;  // bytes: a token's scales in a chunk

// By the tokens of a tile, all of one expert.
template <uint32_t Tokens, uint32_t Stages>
using FormOf = w4a4::Form<Tokens, Stages, Tokens * kTokenScales>;
using Form16 = FormOf<16, 9>;
using Form32 = FormOf<32, 8>;
using Form64 = FormOf<64, 7>;
using Form128 = FormOf<128, 5>;

// A tile's chunk of x: codes [tokens, 64], scales [tokens, 8].
template <class Form>
constexpr uint32_t kTileChunkBytes = Form::kXBytes + Form::kTokens * kTokenScales;

// For so many pairs an expert: a tile has room for twice as many as experts have on average. Not measured.
inline uint32_t tokens_of_a_tile(uint32_t pairs, uint32_t experts) {
  const uint32_t twice = 2 * quotient_up(pairs, experts);
  return twice <= 16 ? 16 : twice <= 32 ? 32 : twice <= 64 ? 64 : 128;
}

// Calls f(form) with the form of `tokens` a tile.
template <class F>
auto for_form(uint32_t tokens, F&& f) {
  if (tokens == 16) return f(Form16());
  if (tokens == 32) return f(Form32());
  if (tokens == 64) return f(Form64());
  return f(Form128());
}

// A pair of a token and an expert, in the order of tiles.
struct alignas(16) Pair {
  uint32_t number, slot, expert;  // slot: tile · tokens of a tile + place in the tile
  float weight;                   // the router's
};

// Parts of one temporary tensor, in bytes from its beginning.
struct Workspace {
  uint32_t most_tiles;
  experts::Parts parts;
  int64_t x, quantized_inner, inner, products, tiles, pairs, counts, flags, shares;

  // `outputs`: of w2.
  template <class Form>
  static Workspace of(uint32_t pairs, uint32_t experts, uint32_t columns, uint32_t inner, uint32_t outputs,
                      uint32_t blocks) {
    Workspace w{};
    w.most_tiles = std::min(experts + pairs / Form::kTokens, pairs);
    const auto tiles_of = [&](uint32_t columns) {
      return w.parts.add(int64_t{w.most_tiles} * quotient_up(columns, kChunk) * kTileChunkBytes<Form>);
    };
    w.x = tiles_of(columns);
    w.quantized_inner = tiles_of(inner);
    w.inner = w.parts.add(int64_t{pairs} * inner * 2);
    w.products = w.parts.add(int64_t{pairs} * outputs * 2);
    w.tiles = w.parts.add(int64_t{w.most_tiles} * sizeof(Tile));
    w.pairs = w.parts.add(int64_t{pairs} * sizeof(Pair));
    w.counts = w.parts.add(8);
    w.flags = w.parts.add(2 * int64_t{blocks} * w4a4::kWarps * 4);
    w.shares = w.parts.add(int64_t{blocks} * Form::kSlots * kLanes * 16);
    return w;
  }
};

}  // namespace nibble::w4a4_experts
