// Experts for few pairs of a token and an expert on SM90: grouped.cuh without a launch before it. Each
// thread block sorts all pairs by itself. Chunks of x and of the intermediate are copied from their rows,
// those of the tokens that a tile has.
//
// Counters in memory are zero before and after each launch: who is last makes them so.
#pragma once

#include "nvfp4_moe/chosen.cuh"
#include "nvfp4_moe/grouped.cuh"

namespace nibble::experts {

struct Choices {
  Chosen chosen;
  const uint4* x;  // [tokens, columns]
  uint32_t pairs, columns, inner_columns;
};

// What a block knows of the pairs.
struct FewTable {
  uint32_t tiles;
  uint2 of_tiles[kMostFewTiles];  // expert and count; first
  float weights[kMostFewPairs];   // in order
  uint16_t order[kMostFewPairs];  // pairs by expert
  uint64_t of_warps[32];

  __device__ __forceinline__ Tile tile(uint32_t i) const {
    const uint2 found = of_tiles[i];
    return {found.x & 0xffff, found.y, found.x >> 16, 0};
  }
};

// Sorts pairs by expert, those of an expert in their order, and divides them into tiles: all blocks find the
// same. `counts`: [warps of pairs, experts].
template <class Form>
__device__ __forceinline__ void sort_pairs(const Choices& c, FewTable& t, uint16_t* counts) {
  constexpr uint32_t kSortWarps = Form::kThreads / kLanes,
                     kTurns = quotient_up(kMostFewPairs, Form::kThreads);
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes,
                 rows = quotient_up(c.pairs, kLanes), experts = c.chosen.experts();
  int32_t ids[kTurns];
  float weights[kTurns];
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) {
    const uint32_t pair = i * Form::kThreads + threadIdx.x;
    ids[i] = pair < c.pairs ? c.chosen.expert_of(pair) : -1;
    weights[i] = pair < c.pairs ? c.chosen.weight_of(pair) : 0.0f;
  }
  for (uint32_t i = threadIdx.x; i < quotient_up(rows * experts, 2); i += Form::kThreads)
    reinterpret_cast<uint32_t*>(counts)[i] = 0;
  __syncthreads();
  uint32_t before[kTurns];
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) {
    const uint32_t row = i * kSortWarps + warp;
    if (row >= rows) break;
    const uint32_t alike = __match_any_sync(~0u, ids[i]);
    before[i] = __popc(alike & ((1u << lane) - 1));
    if (ids[i] >= 0 && before[i] == 0) counts[row * experts + ids[i]] = static_cast<uint16_t>(__popc(alike));
  }
  __syncthreads();
  // A thread has some neighbouring experts.
  const uint32_t each = quotient_up(experts, Form::kThreads), first = threadIdx.x * each,
                 last = min(first + each, experts);
  uint32_t pairs = 0, tiles = 0;
  for (uint32_t expert = first; expert < last; ++expert) {
    uint32_t count = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < rows; ++i) count += counts[i * experts + expert];
    pairs += count;
    tiles += quotient_up(count, Form::kTokens);
  }
  const uint64_t own = uint64_t{tiles} << 32 | pairs;
  uint64_t sum = own;
#pragma unroll
  for (uint32_t by = 1; by < kLanes; by *= 2) {
    const uint64_t more = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += more;
  }
  if (lane == kLanes - 1) t.of_warps[warp] = sum;
  __syncthreads();
  uint64_t others = 0, all = 0;
#pragma unroll
  for (uint32_t i = 0; i < kSortWarps; ++i) {
    const uint64_t of_warp = t.of_warps[i];
    if (i < warp) others += of_warp;
    all += of_warp;
  }
  sum += others - own;
  uint32_t place = static_cast<uint32_t>(sum), tile = static_cast<uint32_t>(sum >> 32);
  for (uint32_t expert = first; expert < last; ++expert) {
    uint32_t end = place;
    for (uint32_t i = 0; i < rows; ++i) {
      uint16_t& at = counts[i * experts + expert];
      const uint32_t count = at;
      at = static_cast<uint16_t>(end);
      end += count;
    }
    for (; place < end; place += Form::kTokens, ++tile)
      t.of_tiles[tile] = {expert | min(Form::kTokens, end - place) << 16, place};
    place = end;
  }
  if (threadIdx.x == 0) t.tiles = static_cast<uint32_t>(all >> 32);
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) {
    const uint32_t row = i * kSortWarps + warp;
    if (row >= rows || ids[i] < 0) continue;
    const uint32_t to = counts[row * experts + ids[i]] + before[i];
    t.order[to] = static_cast<uint16_t>(row * kLanes + lane);
    t.weights[to] = weights[i];
  }
  instruction::publish_to_products();  // copies overwrite the counts
  __syncthreads();
}

// Routes of Multiplier.
struct RoutedInBlock {
  const FewTable& table;
  const uint4* x;
  uint32_t pairs_of_token, columns, inner_columns;

  __device__ __forceinline__ uint32_t columns_of(bool is_second) const {
    return is_second ? inner_columns : columns;
  }
};

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

template <class T, class Operand, class Form>
__device__ __forceinline__ void run_few(const Problem& p, const Choices& c, SharedPlace shared,
                                        uint8_t* memory, FewTable& table) {
  static_assert((Form::kSharedBytes + sizeof(FewTable) + 1024) * Form::kBlocks <=
                warpgroup::kSharedBytes + 1024);
  static_assert(kMostFewPairs / kLanes * kMostFewExperts * 2 <= Form::kStages * Form::kStageBytes);
  const RoutedInBlock routes{table, c.x, c.chosen.pairs_of_token(), c.columns, c.inner_columns};
  const Multiplier<T, Operand, Form, RoutedInBlock> multiplier{p, shared, routes};
  multiplier.start();
  if (threadIdx.x == 0) {
    instruction::prefetch_map(p.first.codes);
    instruction::prefetch_map(p.first.scales);
    instruction::prefetch_map(p.second.codes);
    instruction::prefetch_map(p.second.scales);
    if (c.chosen.has_shared()) {
      instruction::prefetch_map(p.shared_first.codes);
      instruction::prefetch_map(p.shared_first.scales);
      instruction::prefetch_map(p.shared_second.codes);
      instruction::prefetch_map(p.shared_second.scales);
    }
  }
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  sort_pairs<Form>(c, table, reinterpret_cast<uint16_t*>(memory));
  multiplier.run();
}

#endif
}  // namespace nibble::experts
