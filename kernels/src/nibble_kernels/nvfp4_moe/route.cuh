// Before grouped.cuh: pairs of a token and an expert in tiles, and x in the order of their products.
#pragma once

#include "nibble/tensor_core.cuh"
#include "nvfp4_moe/chosen.cuh"
#include "nvfp4_moe/grouped_form.h"

namespace nibble::experts {

constexpr uint32_t kRouteThreads = 1024, kRouteWarps = kRouteThreads / kLanes;
constexpr uint32_t kMostExperts = kRouteThreads;  // a thread for each
constexpr uint32_t kFewPairs = 1024;              // every block routes them by itself

struct Routing {
  Chosen chosen;
  uint32_t pairs, most_tiles;
  Tile* tiles;
  uint32_t *tile_count, *order;  // order: [pairs], pairs by expert
  float* ordered_weights;        // [pairs]
  uint32_t *queue, *complete;    // of grouped.cuh: to be zero
};

struct Ordering {
  const uint4* x;  // [tokens, columns]
  uint4 *to, *inner;
  uint32_t pairs_of_token, columns, chunks;
  uint32_t inner_columns, inner_chunks;
};

// Exclusive sums over the threads, which have an expert each.
struct Offsets {
  uint32_t pairs, tiles;
};
__device__ __forceinline__ Offsets offsets_of(uint32_t pairs, uint32_t tiles, uint64_t* of_warps,
                                              uint32_t& all_tiles) {
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint64_t own = uint64_t{tiles} << 32 | pairs;
  uint64_t sum = own;
#pragma unroll
  for (uint32_t by = 1; by < kLanes; by *= 2) {
    const uint64_t before = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += before;
  }
  if (lane == kLanes - 1) of_warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    uint64_t total = of_warps[lane];
#pragma unroll
    for (uint32_t by = 1; by < kLanes; by *= 2) {
      const uint64_t before = __shfl_up_sync(~0u, total, by);
      if (lane >= by) total += before;
    }
    of_warps[lane] = total;
  }
  __syncthreads();
  all_tiles = static_cast<uint32_t>(of_warps[kRouteWarps - 1] >> 32);
  sum += (warp ? of_warps[warp - 1] : 0) - own;
  return {static_cast<uint32_t>(sum), static_cast<uint32_t>(sum >> 32)};
}

template <class TileOf>
__device__ __forceinline__ void write_tiles(uint32_t tokens, uint32_t count, const Offsets& at,
                                            TileOf&& write) {
  for (uint32_t i = 0; i * tokens < count; ++i)
    write(at.tiles + i, Tile{threadIdx.x, at.pairs + i * tokens, min(tokens, count - i * tokens), 0});
}

// All counters zero, before grouped.cuh.
__device__ __forceinline__ void reset(const Routing& r) {
  if (threadIdx.x == 0) *r.queue = 0;
  for (uint32_t i = threadIdx.x; i < r.most_tiles; i += kRouteThreads) r.complete[i] = 0;
}

// What a block knows of few pairs.
struct Table {
  uint64_t of_warps[kRouteWarps];
  Tile tiles[kFewPairs];
  uint16_t order[kFewPairs];
};

// Up to kFewPairs pairs, without atomic operations: all blocks find the same order. `counts`: [warps with
// pairs, experts].
__device__ __forceinline__ uint32_t route_few(const Routing& r, uint32_t tokens, Table& table,
                                              uint16_t* counts) {
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, pair = threadIdx.x,
                 warps = quotient_up(r.pairs, kLanes), experts = r.chosen.experts();
  const int32_t id = pair < r.pairs ? r.chosen.expert_of(pair) : -1;
  const bool here = id >= 0;
  for (uint32_t i = threadIdx.x; i < warps * experts; i += kRouteThreads) counts[i] = 0;
  __syncthreads();
  const uint32_t alike = __match_any_sync(~0u, id), before = __popc(alike & ((1u << lane) - 1));
  if (here && before == 0) counts[warp * experts + id] = static_cast<uint16_t>(__popc(alike));
  __syncthreads();
  uint32_t count = 0;
  if (threadIdx.x < experts) {
    for (uint32_t i = 0; i < warps; ++i) {
      uint16_t& place = counts[i * experts + threadIdx.x];
      const uint32_t more = place;
      place = static_cast<uint16_t>(count);
      count += more;
    }
  }
  uint32_t all_tiles;
  const Offsets at = offsets_of(count, quotient_up(count, tokens), table.of_warps, all_tiles);
  if (threadIdx.x < experts) {
    for (uint32_t i = 0; i < warps; ++i) counts[i * experts + threadIdx.x] += static_cast<uint16_t>(at.pairs);
    write_tiles(tokens, count, at, [&](uint32_t i, const Tile& tile) {
      table.tiles[i] = tile;
      if (blockIdx.x == 0) r.tiles[i] = tile;
    });
  }
  __syncthreads();
  if (here) {
    const uint32_t place = counts[warp * experts + id] + before;
    table.order[place] = static_cast<uint16_t>(pair);
    if (blockIdx.x == 0) {
      r.order[place] = pair;
      r.ordered_weights[place] = r.chosen.weight_of(pair);
    }
  }
  if (blockIdx.x == 0) {
    reset(r);
    if (threadIdx.x == 0) *r.tile_count = all_tiles;
  }
  __syncthreads();
  return all_tiles;
}

// Any number of pairs, in one block. Where in a tile a pair lies does not matter to its sums.
__device__ __forceinline__ void route_many(const Routing& r, uint32_t tokens, uint64_t* of_warps,
                                           uint32_t* counts) {
  const uint32_t experts = r.chosen.experts();
  if (threadIdx.x < experts) counts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll 4
  for (uint32_t pair = threadIdx.x; pair < r.pairs; pair += kRouteThreads) {
    const int32_t id = r.chosen.expert_of(pair);
    if (id >= 0) atomicAdd(counts + id, 1u);
  }
  __syncthreads();
  const uint32_t count = threadIdx.x < experts ? counts[threadIdx.x] : 0;
  uint32_t all_tiles;
  const Offsets at = offsets_of(count, quotient_up(count, tokens), of_warps, all_tiles);
  write_tiles(tokens, count, at, [&](uint32_t i, const Tile& tile) { r.tiles[i] = tile; });
  if (threadIdx.x < experts) counts[threadIdx.x] = at.pairs;
  __syncthreads();
#pragma unroll 4
  for (uint32_t pair = threadIdx.x; pair < r.pairs; pair += kRouteThreads) {
    const int32_t id = r.chosen.expert_of(pair);
    if (id < 0) continue;
    const uint32_t place = atomicAdd(counts + id, 1u);
    r.order[place] = pair;
    r.ordered_weights[place] = r.chosen.weight_of(pair);
  }
  reset(r);
  if (threadIdx.x == 0) *r.tile_count = all_tiles;
}

// x in the order of Form::word_of. A warp has 8 tokens of a chunk; zeros past a tile's last token and past
// the last column, and in the intermediate's last chunk, which its columns may not fill.
template <class Form, class Order>
__device__ __forceinline__ void order_x(const Ordering& o, uint32_t tiles, const Tile* of_tile, Order order) {
  const uint32_t lane = threadIdx.x % kLanes, warps = gridDim.x * (blockDim.x / kLanes);
  const uint32_t token_in_group = lane % kTokenGroup, piece = lane / kTokenGroup;
  const bool pads = o.inner_columns % kChunk != 0;
  const uint32_t each = (o.chunks + pads) * Form::kTokenGroups;
  for (uint32_t unit = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes; unit < tiles * each;
       unit += warps) {
    const uint32_t tile = unit / each, place = unit - tile * each, chunk = place / Form::kTokenGroups,
                   token = place % Form::kTokenGroups * kTokenGroup + token_in_group;
    const Tile own = of_tile[tile];
    uint4 quarters[4] = {};
    if (chunk < o.chunks && token < own.count) {
      const uint4* const row = o.x + size_t{order[own.first + token] / o.pairs_of_token} * (o.columns / 8);
#pragma unroll
      for (uint32_t t = 0; t < 4; ++t) {
        const uint32_t column = chunk * kChunk + t * 32 + piece * 8;
        if (column < o.columns) quarters[t] = __ldg(row + column / 8);
      }
    }
    uint4* const to = chunk < o.chunks
                          ? o.to + (size_t{tile} * o.chunks + chunk) * (Form::kXChunkBytes / 16)
                          : o.inner + (size_t{tile} * o.inner_chunks + o.inner_chunks - 1) *
                                          (Form::kXChunkBytes / 16);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const auto of = [&](const uint4& q) { return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w; };
      if constexpr (Form::kWarpgroup) {
        to[(piece * 4 + i) * Form::kTokens + token] =
            make_uint4(of(quarters[0]), of(quarters[1]), of(quarters[2]), of(quarters[3]));
      } else {
        to[(piece * Form::kTokens + token) * 4 + i] = quarters[i];
      }
    }
  }
}

}  // namespace nibble::experts
