// The units of a batch, in order: of kernels that copy tiles with tensor maps.
//
// A unit is a split of a sequence for a KV head and a tile of rows. Heads come first, then splits, then
// sequences: units that are computed at a time read the same pages.
#pragma once

#include "decode_attention/row.cuh"
#include "nibble/warpgroup_instructions.cuh"

namespace nibble::attention {

struct Unit {
  uint32_t splits;                // of the sequence; 0: there are no more units
  uint32_t split, begin, tiles;   // `begin`: the first token of its tiles
  uint32_t first, length;         // tokens that queries see
  uint32_t query_begin, queries;  // of the sequence
  uint32_t sequence, head, row_tile;
  uint32_t slot;        // in global memory, of the first split
  uint32_t has_splits;  // behind the last unit: whether a sequence has several splits
};

// The rows of a unit's products.
__device__ __forceinline__ uint32_t rows_of(const Problem& p, const Unit& unit) {
  const uint32_t rows = p.group * unit.queries, before = unit.row_tile * kRows;
  return rows > before ? min(rows - before, kRows) : 0;
}
// Which of the sequence's queries a row is of; the last one for what is not a row.
__device__ __forceinline__ uint32_t query_of(const Problem& p, const Unit& unit, uint32_t row) {
  return p.most_queries == 1 ? 0 : min((unit.row_tile * kRows + row) / p.group, unit.queries - 1);
}
__device__ __forceinline__ uint32_t seen_end(const Unit& unit, uint32_t query) {
  const uint32_t end = unit.length + query + 1;
  return end > unit.queries ? min(end - unit.queries, unit.length) : 0;
}
__device__ __forceinline__ uint32_t seen_first(const Problem& p, const Unit& unit, uint32_t query) {
  const uint32_t end = seen_end(unit, query);
  return p.window != 0 && end > p.window ? end - p.window : 0;
}

__device__ __forceinline__ RowPlace place_of(const Problem& p, const Unit& unit, uint32_t row) {
  if (p.most_queries == 1) return {unit.query_begin, unit.head * p.group + row};
  const uint32_t all = unit.row_tile * kRows + row, query = all / p.group;
  return {unit.query_begin + query, unit.head * p.group + all - query * p.group};
}
// Goes around places with barriers in shared memory.
struct Place {
  uint32_t number = 0, parity = 0;
  __device__ __forceinline__ void advance(uint32_t by, uint32_t places) {  // by: at most `places`
    number += by;
    if (number >= places) number -= places, parity ^= 1;
  }
};

__device__ __forceinline__ void wait_for(uint64_t& barrier, uint32_t parity) {
  instruction::wait_for_phase(instruction::shared_place(&barrier), parity);
}

// Finds units in rising order. Each lane has one of 32 sequences. Division::splits_of(problem, tiles of a
// sequence) says how many splits it has, Division::first_tile(problem, tiles, splits, split) where one
// begins.
template <class Division>
class Finder {
 public:
  __device__ __forceinline__ explicit Finder(const Problem& p) : p_(p), pairs_(p.kv_heads * row_tiles_of(p)) {
    load();
  }

  // Calls of all lanes together.
  __device__ __forceinline__ Unit find(uint32_t number) {
    for (;;) {
      const uint32_t owners = __ballot_sync(~0u, end_ > number);
      if (owners != 0) return unit_of(number, __ffs(static_cast<int>(owners)) - 1);
      before_ = __shfl_sync(~0u, end_, kLanes - 1);
      sequence_ += kLanes;
      if (sequence_ >= p_.sequences) return {.has_splits = has_splits_};
      load();
    }
  }

 private:
  __device__ __forceinline__ void load() {
    const uint32_t lane = threadIdx.x % kLanes, own = sequence_ + lane;
    uint32_t units = 0;
    query_begin_ = queries_ = 0;
    span_ = Span{};
    if (own < p_.sequences) {
      query_begin_ = static_cast<uint32_t>(__ldg(p_.query_begins + own));
      const uint32_t query_end = static_cast<uint32_t>(__ldg(p_.query_begins + own + 1));
      const uint32_t length = static_cast<uint32_t>(max(__ldg(p_.lengths + own), 0));
      queries_ = query_end - query_begin_;
      span_ = undivided_span(p_, length, queries_);
      span_.splits = queries_ == 0 ? 0 : Division::splits_of(p_, span_.tiles);
      units = span_.splits * pairs_;
    }
    has_splits_ |= __any_sync(~0u, span_.splits > 1);
    end_ = units;
    for (uint32_t step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_sync(~0u, end_, lane >= step ? lane - step : lane);
      if (lane >= step) end_ += other;
    }
    end_ += before_;
    begin_ = end_ - units;
  }

  __device__ __forceinline__ Unit unit_of(uint32_t number, uint32_t owner) const {
    Unit unit;
    unit.splits = __shfl_sync(~0u, span_.splits, owner);
    const uint32_t before = __shfl_sync(~0u, begin_, owner), all = __shfl_sync(~0u, span_.tiles, owner);
    unit.first = __shfl_sync(~0u, span_.first, owner);
    unit.length = __shfl_sync(~0u, span_.end, owner);
    unit.query_begin = __shfl_sync(~0u, query_begin_, owner);
    unit.queries = __shfl_sync(~0u, queries_, owner);
    const uint32_t in_sequence = number - before, row_tiles = row_tiles_of(p_);
    unit.split = in_sequence / pairs_;
    const uint32_t pair = in_sequence - unit.split * pairs_;
    unit.head = pair / row_tiles;
    unit.row_tile = pair - unit.head * row_tiles;
    unit.sequence = sequence_ + owner;
    unit.slot = before + pair * unit.splits;
    const uint32_t from = Division::first_tile(p_, all, unit.splits, unit.split);
    unit.begin = unit.first / kTile * kTile + from * kTile;
    unit.tiles = Division::first_tile(p_, all, unit.splits, unit.split + 1) - from;
    // A sequence with fewer queries than others has no rows in the last tiles of them.
    if (unit.row_tile * kRows >= p_.group * unit.queries) unit.tiles = 0;
    return unit;
  }

  const Problem& p_;
  const uint32_t pairs_;
  uint32_t sequence_ = 0, before_ = 0;  // of lane 0; units of the sequences before that
  uint32_t begin_, end_, query_begin_, queries_;
  Span span_;
  uint32_t has_splits_ = 0;
};

}  // namespace nibble::attention
