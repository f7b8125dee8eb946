// Experts for few pairs of a token and an expert on SM90, in one launch from the router's choices to the sum:
// grouped.cuh with another beginning and another end. Each thread block sorts all pairs by itself, a warp
// fetches x from its rows, and the block that writes the last product of some rows adds them up.
//
// Counters in memory are zero before and after each launch: who is last makes them so.
#pragma once

#include "nvfp4_moe/grouped.cuh"

namespace nibble::experts {

constexpr uint32_t kMostPairsAtOnce = 256, kMostRowBlocks = 256;

// Of all blocks, in memory.
struct Counters {
  uint32_t queue, finished;             // units taken; row blocks of w2 that are written
  uint32_t written[kMostRowBlocks];     // tiles of a row block of w2
  uint32_t complete[kMostPairsAtOnce];  // row blocks of a tile's intermediate
};

struct Choices {
  const int32_t* ids;    // [pairs]; below 0 or too large: an expert of another process
  const float* weights;  // [pairs]
  const uint4* x;        // [tokens, columns]
  void* out;             // [tokens, outputs of w2]
  uint32_t pairs, experts, tokens, topk, columns;
  Counters* counters;

  __device__ __forceinline__ bool is_here(int32_t id) const {
    return id >= 0 && id < static_cast<int32_t>(experts);
  }
};

// What a block knows of the pairs.
struct PairTable {
  uint32_t starts[kMostPairsAtOnce / kLanes];  // a bit for each place in order: whether a tile begins there
  uint32_t tiles, to_add_up;
  bool is_last;
  uint4 keys[kMostPairsAtOnce / 4];  // of pairs: expert, then number; kNowhere: of another process
  uint16_t order[kMostPairsAtOnce];
  uint16_t experts[kMostPairsAtOnce], first[kMostPairsAtOnce], count[kMostPairsAtOnce];  // of tiles
  uint8_t row_blocks[kMostRowBlocks];  // that this block adds up

  __device__ __forceinline__ uint32_t& key(uint32_t pair) { return (&keys[0].x)[pair]; }
  __device__ __forceinline__ uint32_t key(uint32_t pair) const { return (&keys[0].x)[pair]; }
};
constexpr uint32_t kNowhere = ~0u;

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

// Sorts pairs by expert, those of an expert in their order, and divides them into tiles. No order of arrival
// matters, so that all blocks find the same.
template <uint32_t Tokens>
__device__ __forceinline__ void sort_pairs(const Choices& c, PairTable& t) {
  const uint32_t lane = threadIdx.x % kLanes;
  if (threadIdx.x == 0) {
    t.tiles = t.to_add_up = 0;
    t.is_last = false;
  }
  for (uint32_t pair = threadIdx.x; pair < kMostPairsAtOnce; pair += blockDim.x) {
    const int32_t id = pair < c.pairs ? c.ids[pair] : -1;
    t.key(pair) = c.is_here(id) ? static_cast<uint32_t>(id) * kMostPairsAtOnce + pair : kNowhere;
    if (pair % kLanes == 0) t.starts[pair / kLanes] = 0;
  }
  __syncthreads();
  for (uint32_t pair = threadIdx.x; pair < c.pairs; pair += blockDim.x) {
    const uint32_t key = t.key(pair);
    if (key == kNowhere) continue;
    // Keys differ: a pair's place is how many are below.
    const uint32_t begin = key - pair, end = begin + kMostPairsAtOnce;
    uint32_t place = 0, before_expert = 0, to_expert = 0;
    const auto compare = [&](uint32_t other) {
      place += other < key;
      before_expert += other < begin;
      to_expert += other < end;
    };
    for (uint32_t i = 0; i < (c.pairs + 3) / 4; ++i) {
      const uint4 others = t.keys[i];
      compare(others.x);
      compare(others.y);
      compare(others.z);
      compare(others.w);
    }
    t.order[place] = static_cast<uint16_t>(pair);
    if ((place - before_expert) % Tokens != 0) continue;
    // Of the tile that begins here; its number is known when all beginnings are.
    t.experts[place] = static_cast<uint16_t>(begin / kMostPairsAtOnce);
    t.count[place] = static_cast<uint16_t>(min(Tokens, to_expert - place));
    atomicOr(t.starts + place / kLanes, 1u << place % kLanes);
  }
  __syncthreads();
  // Tiles move down to their numbers: by one warp, 32 at a time, so that none is overwritten before it moved.
  if (threadIdx.x < kLanes) {
    uint32_t tiles = 0;
    for (uint32_t begin = 0; begin < c.pairs; begin += kLanes) {
      const uint32_t starts = t.starts[begin / kLanes], place = begin + lane;
      const bool is_start = starts >> lane & 1;
      const uint16_t expert = is_start ? t.experts[place] : 0, count = is_start ? t.count[place] : 0;
      __syncwarp();
      const uint32_t to = tiles + __popc(starts & ((1u << lane) - 1));
      if (is_start) {
        t.experts[to] = expert;
        t.count[to] = count;
        t.first[to] = static_cast<uint16_t>(place);
      }
      __syncwarp();
      tiles += __popc(starts);
    }
    if (lane == 0) t.tiles = tiles;
  }
  __syncthreads();
}

// The tiles of a block's table, with x in its rows.
struct RoutedInBlock {
  static constexpr bool kInBlock = true;
  static constexpr uint32_t kFillers = kLanes;

  const Choices& c;
  PairTable& table;

  __device__ __forceinline__ uint32_t tiles() const { return table.tiles; }
  __device__ __forceinline__ Tile tile(uint32_t i) const {
    return {table.experts[i], table.first[i], table.count[i], 0};
  }
  __device__ __forceinline__ uint32_t pair(uint32_t place) const { return table.order[place]; }
  __device__ __forceinline__ float weight(uint32_t place) const {
    return __ldg(c.weights + table.order[place]);
  }

  // By a warp: a chunk of a tile's tokens in the order of Form::word_of; zeros past the last token and past
  // the last column. 16 lanes read a token's chunk.
  template <class Form>
  __device__ __forceinline__ void fetch_x(const Tile& tile, uint32_t chunk, SharedPlace to,
                                          SharedPlace full) const {
    static_assert(!Form::kWarpgroup);
    const uint32_t lane = threadIdx.x % kLanes, piece = lane % 16, column = chunk * kChunk + piece * 8;
    const SharedPlace place = to + (piece % 4 * Form::kTokens * 4 + piece / 4) * 16;
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokens; i += 2) {
      const uint32_t token = i + lane / 16;
      const bool is_there = token < tile.count && column < c.columns;
      const uint32_t row = is_there ? table.order[tile.first + token] / c.topk : 0;
      instruction::copy_or_clear(place + token * 64,
                                 c.x + (size_t{row} * c.columns + (is_there ? column : 0)) / 8, is_there);
    }
    instruction::arrive_after_copies(full);
  }

  // By all consuming threads of the tile's first row block: zeros in the intermediate's last chunk, which its
  // columns may not fill.
  template <class Form>
  __device__ __forceinline__ void clear_padding(const Problem& p, uint32_t tile, uint32_t columns) const {
    const uint32_t all = p.second.chunks * kChunk, pairs = (all - columns) / 2;
    uint32_t* const chunk =
        p.inner + (size_t{tile} + 1) * p.second.chunks * (Form::kXBytes / 4) - Form::kXBytes / 4;
    for (uint32_t i = threadIdx.x; i < pairs * Form::kTokens; i += Form::kConsumerWarps * kLanes)
      chunk[Form::word_of(i % Form::kTokens, columns + i / Form::kTokens * 2)] = 0;
  }

  // One thread, after its block has written a unit of w2.
  __device__ __forceinline__ void row_block_is_written(const Problem& p, uint32_t row_block) const {
    if (instruction::add_to_all(c.counters->written + row_block) + 1 != table.tiles) return;
    table.row_blocks[table.to_add_up++] = static_cast<uint8_t>(row_block);
    table.is_last = instruction::add_to_all(&c.counters->finished) + 1 == p.second.row_blocks;
  }
};

// out[token] of some row blocks = the sum of the token's products, in the order of its choices.
template <class T, class Form>
__device__ __forceinline__ void add_up(const Problem& p, const Choices& c, const PairTable& t) {
  constexpr uint32_t kPieces = 2 * Form::kGroups;  // of 8 rows: those of the upper half, then the lower ones
  const uint32_t outputs = p.second.outputs, half = outputs / 2, each = c.tokens * kPieces;
  for (uint32_t i = threadIdx.x; i < t.to_add_up * each; i += blockDim.x) {
    const uint32_t block = t.row_blocks[i / each], token = i % each / kPieces, piece = i % kPieces;
    const uint32_t row = (block * Form::kGroups + piece % Form::kGroups) * kGroup;
    if (row >= half) continue;
    const uint32_t at = row + piece / Form::kGroups * half;
    const T* const products = static_cast<const T*>(p.products) + at;
    float sums[8] = {};
#pragma unroll 4
    for (uint32_t k = 0; k < c.topk; ++k) {
      const uint32_t pair = token * c.topk + k;
      if (t.key(pair) == kNowhere) continue;
      const uint4 more = __ldcg(reinterpret_cast<const uint4*>(products + size_t{pair} * outputs));
      const T* const values = reinterpret_cast<const T*>(&more);
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) sums[j] += to_float(values[j]);
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(c.out) + size_t{token} * outputs + at) =
        make_uint4(pair_of(T(), sums[0], sums[1]), pair_of(T(), sums[2], sums[3]),
                   pair_of(T(), sums[4], sums[5]), pair_of(T(), sums[6], sums[7]));
  }
}

// Where no expert is this process's.
__device__ __forceinline__ void clear_sums(const Problem& p, const Choices& c) {
  uint4* const out = static_cast<uint4*>(c.out);
  const uint32_t words = c.tokens * (p.second.outputs / 8);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    out[i] = make_uint4(0, 0, 0, 0);
}

template <class T, class Operand, class Form>
__device__ __forceinline__ void run_at_once(const Problem& p, const Choices& c, SharedPlace shared,
                                            PairTable& table) {
  static_assert((Form::kSharedBytes + sizeof(PairTable) + 1024) * Form::kBlocks <=
                warpgroup::kSharedBytes + 1024);
  RoutedInBlock routes{c, table};
  const Multiplier<T, Operand, Form, RoutedInBlock> multiplier{p, shared, routes};
  multiplier.start();
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  sort_pairs<Form::kTokens>(c, table);
  if (table.tiles == 0) return clear_sums(p, c);
  multiplier.run();
  __syncthreads();
  add_up<T, Form>(p, c, table);
  if (!table.is_last) return;
  // No other block looks at a counter any more: each unit has been taken, computed and announced.
  uint32_t* const counters = &c.counters->queue;
  for (uint32_t i = threadIdx.x; i < sizeof(Counters) / 4; i += blockDim.x) counters[i] = 0;
}

#endif
}  // namespace nibble::experts
