// A batch of decode attention, and how its sequences are divided. For host and device.
#pragma once

#include <cstdint>

#include "nibble/arch.h"

namespace nibble::attention {

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kRows = 16;  // at most, of a product: queries of one KV head, head by head
inline constexpr uint32_t kTile = 16;  // tokens of a product; they lie in one page
inline constexpr uint32_t kMostSequences = 256;
inline constexpr uint32_t kMostSplits = 128;
inline constexpr uint32_t kRanks = 8;  // blocks of a cluster

// Strides of the cache are in bytes; a token's key is followed by its value.
struct Problem {
  const void* query;  // bfloat16
  const uint8_t* cache;
  const int32_t* pages;            // [sequences, pages_stride]
  const int32_t* lengths;          // of the sequences with the query tokens; 0: no sequence
  const int32_t* query_begins;     // [sequences + 1]
  const float *k_scale, *v_scale;  // of FP8, or null
  const float* sinks;              // a query head, or null
  void* out;                       // bfloat16 [tokens, heads, D]
  float* lse;                      // [tokens, heads], or null
  float* partials;                 // slots of partial_floats()
  uint32_t* counters;              // [sequences, KV heads, row tiles] of kRows * kRanks, zero between calls
  int64_t page_stride, token_stride, head_stride;
  int64_t query_token_stride, query_head_stride;  // elements
  uint32_t sequences, kv_heads, group, most_queries;
  uint32_t tokens_per_page, pages_stride;
  uint32_t window;  // tokens that a query sees, itself included; 0: all
  uint32_t least_chunk, most_splits;
  float scale, soft_cap;  // soft_cap 0: none
  uint32_t is_early;  // the kernel before this one writes nothing of it but queries and what they add to the cache
  // Of clusters: how many tokens of a sequence one computes alone, and how many of them share a longer one.
  uint32_t most_whole, sharing;
  // Of warpgroups: how many blocks a KV head's rows of a sequence can have at a time. Depends on the batch's size.
  uint32_t blocks_each;
};

NIBBLE_FUNCTION constexpr uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
NIBBLE_FUNCTION uint32_t row_tiles_of(const Problem& p) {
  return quotient_up(p.group * p.most_queries, kRows);
}

// What a sequence's queries see, in tiles, and its equal splits but for the last. Depends on this sequence
// alone, so that its result does not depend on others.
//
// A long sequence has splits of `least_chunk` tokens up to half of `most_splits` of them, then as many larger
// ones up to twice that size, then more of them, then larger ones.
struct Span {
  uint32_t first, end;     // tokens; `begin` of them is a multiple of a tile
  uint32_t begin;          // the first that is read
  uint32_t tiles, chunk;   // `chunk` of a split
  uint32_t splits;         // 0 for a sequence without queries, else at least 1
  bool is_together;        // the warps of one block take all of its splits
};

NIBBLE_FUNCTION Span undivided_span(const Problem& p, uint32_t length, uint32_t queries) {
  Span span{0, length, 0, 0, 0, 0, true};
  const uint32_t seen_by_first = length < queries ? 0 : length - queries + 1;
  if (p.window != 0 && seen_by_first > p.window) span.first = seen_by_first - p.window;
  span.begin = span.first / kTile * kTile;
  if (queries != 0) span.tiles = quotient_up(span.end - span.begin, kTile);
  return span;
}

// A span without tiles has one empty split.
NIBBLE_FUNCTION uint32_t splits_of(uint32_t tiles, uint32_t chunk) {
  return tiles == 0 ? 1 : quotient_up(tiles, chunk);
}

NIBBLE_FUNCTION Span span_of(const Problem& p, uint32_t length, uint32_t queries, uint32_t warps) {
  Span span = undivided_span(p, length, queries);
  if (queries == 0) return span;
  const uint32_t least = p.least_chunk / kTile, half = quotient_up(p.most_splits, 2);
  span.is_together = span.tiles <= warps * least;
  if (span.is_together) {
    span.chunk = quotient_up(span.tiles, warps);
  } else {
    const bool is_long = span.tiles > p.most_splits * least;
    const uint32_t smallest = is_long ? 2 * least : least;
    span.chunk = quotient_up(span.tiles, is_long ? p.most_splits : half);
    if (span.chunk < smallest) span.chunk = smallest;
  }
  span.splits = splits_of(span.tiles, span.chunk);
  return span;
}

// Floats of a split's partial result: rows of D, then each row's maximum, then each row's sum.
NIBBLE_FUNCTION uint32_t slot_rows(const Problem& p) {
  const uint32_t rows = p.group * p.most_queries;
  return rows < kRows ? rows : kRows;
}
NIBBLE_FUNCTION uint32_t partial_floats(const Problem& p, uint32_t head_dim) {
  return slot_rows(p) * head_dim + quotient_up(2 * slot_rows(p), 4) * 4;
}

}  // namespace nibble::attention
