// Many rows of activations times an NVFP4 weight on SM90: the decode kernel's weight as the register operand
// of a warpgroup's products. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A warpgroup has strips of 64 rows, four of the weight's groups, one for each warp. One warp fetches weights
// and x in bulk; the others decode a quarter of a tile while the tensor cores multiply the one before. Blocks
// of a cluster share the columns; their sums meet in shared memory, in the order of ranks.
#pragma once

#include <type_traits>

#include "nibble/mma_operand.cuh"
#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_linear/warpgroup_form.h"
#include "nvfp4_linear/warpgroup_product.cuh"

namespace nibble::warpgroup {

struct Problem {
  CUtensorMap codes, scales;  // words of [groups, chunks, 256] and of [groups, chunks, 32]: weight.py
  const uint4* x;             // [tiles of tokens, chunks, steps, 2, tokens of a tile]: order_x
  Output output;
  uint32_t tokens, columns, chunks, groups;
  uint32_t row_blocks, token_tiles, ranks;
  // Of equal ranges: a block's part of a unit that another began, [blocks, slots, 32], and whether it is
  // there, [blocks, warps].
  float4* parts;
  uint32_t* flags;
};

// A lane's part of bringing x [tokens, columns] into order: 8 columns of each quarter t of a chunk. Of a
// product's 16 columns a lane of the weight has the pairs (32 t + 4 step) and (32 t + 4 step + 2).
__device__ __forceinline__ void load_quarters(const uint4* x, uint32_t token, uint32_t tokens, uint32_t chunk,
                                              uint32_t columns, uint32_t piece, uint4 (&quarters)[4]) {
#pragma unroll
  for (uint32_t t = 0; t < 4; ++t) {
    const uint32_t column = chunk * kChunk + t * 32 + piece * 8;
    quarters[t] = make_uint4(0, 0, 0, 0);
    if (token < tokens && column < columns) quarters[t] = __ldcg(x + (size_t{token} * columns + column) / 8);
  }
}
// The pieces of 16 bytes for the 8 first and 8 last columns of two products.
__device__ __forceinline__ uint4 ordered(const uint4 (&quarters)[4], uint32_t i) {
  const auto of = [&](const uint4& q) { return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w; };
  return make_uint4(of(quarters[0]), of(quarters[1]), of(quarters[2]), of(quarters[3]));
}

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

template <class T, class Operand, class Form>
struct Multiplier {
  using Sums = float[Form::kSums];

  const Problem& p;
  const SharedPlace shared;  // [stages]: codes [groups], scales [groups], x
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t rank = Form::kSplits ? instruction::cluster_rank() : 0;
  const uint32_t units = p.row_blocks * p.token_tiles, clusters = gridDim.x / p.ranks;
  // The last blocks begin, so that whom a block waits for has begun before it.
  const uint32_t range = gridDim.x - 1 - blockIdx.x;
  const uint32_t begin = Form::kSplits ? rank * p.chunks / p.ranks : 0,
                 end = Form::kSplits ? (rank + 1) * p.chunks / p.ranks : p.chunks;

  __device__ __forceinline__ SharedPlace stage(uint32_t i) const { return shared + i * Form::kStageBytes; }
  __device__ __forceinline__ SharedPlace barriers() const {
    return shared + Form::kStages * Form::kStageBytes;
  }
  __device__ __forceinline__ SharedPlace full(uint32_t i) const { return barriers() + i * 8; }
  __device__ __forceinline__ SharedPlace empty(uint32_t i) const {
    return barriers() + (Form::kStages + i) * 8;
  }
  // Of the parts that this block adds up: all have come; all have been read.
  __device__ __forceinline__ SharedPlace parts_here() const { return barriers() + 2 * Form::kStages * 8; }
  __device__ __forceinline__ SharedPlace parts_read() const { return parts_here() + 8; }
  __device__ __forceinline__ SharedPlace parts() const { return barriers() + Form::kBarrierBytes; }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      instruction::prefetch_map(p.codes);
      instruction::prefetch_map(p.scales);
      for (uint32_t i = 0; i < Form::kStages; ++i) {
        instruction::init_barrier(full(i), 1);
        instruction::init_barrier(empty(i), Form::kConsumerWarps);
      }
      instruction::init_barrier(parts_here(), p.ranks * Form::kConsumerWarps);
      instruction::init_barrier(parts_read(), p.ranks * Form::kConsumerWarps);
      instruction::publish_barriers();
    }
    if constexpr (Form::kSplits) {
      instruction::cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  // A block's chunks in order: equal ranges of all, or a rank's columns of every unit of its cluster. Bit i
  // of `phases` is the parity of the phase in which stage i is filled.
  struct Place {
    uint32_t unit, chunk, left, stage = 0, phases = 0;
    __device__ __forceinline__ uint32_t parity() const { return phases >> stage & 1; }
    __device__ __forceinline__ void next_stage() {
      phases ^= 1u << stage;
      if (++stage == Form::kStages) stage = 0;
    }
  };
  __device__ __forceinline__ uint32_t range_begin(uint32_t i) const {
    return static_cast<uint32_t>(uint64_t{i} * units * p.chunks / gridDim.x);
  }
  __device__ __forceinline__ Place first() const {
    if constexpr (Form::kRanges) {
      const uint32_t from = range_begin(range);
      return {from / p.chunks, from % p.chunks, range_begin(range + 1) - from};
    }
    const uint32_t cluster = blockIdx.x / p.ranks, count = (units - cluster + clusters - 1) / clusters;
    return {cluster, begin, count * (end - begin)};
  }
  __device__ __forceinline__ void advance(Place& place) const {
    place.next_stage();
    --place.left;
    if (++place.chunk == end) {
      place.chunk = begin;
      place.unit += Form::kRanges ? 1 : clusters;
    }
  }

  __device__ __forceinline__ uint32_t first_group_of(uint32_t unit) const {
    return unit / p.token_tiles * Form::kGroups;
  }
  __device__ __forceinline__ void fetch_weight(const Place& at) const {
    const uint32_t first_group = first_group_of(at.unit);
    instruction::arrive_expecting(full(at.stage), Form::kStageBytes);
    instruction::copy_box(stage(at.stage), p.codes, at.chunk * (kCodeBytes / 4), first_group, full(at.stage));
    instruction::copy_box(stage(at.stage) + Form::kGroups * kCodeBytes, p.scales,
                          at.chunk * (kScaleBytes / 4), first_group, full(at.stage));
  }
  __device__ __forceinline__ void fetch_x(const Place& at) const {
    const size_t tile = size_t{at.unit % p.token_tiles} * p.chunks + at.chunk;
    instruction::copy_bulk(stage(at.stage) + Form::kWeightBytes, p.x + tile * (Form::kXBytes / 16),
                           Form::kXBytes, full(at.stage));
  }

  // One thread.
  __device__ __forceinline__ void fetch() const {
    Place at = first();
    Place x_at = at;
    for (uint32_t i = 0; i < Form::kStages && at.left != 0; ++i, advance(at)) fetch_weight(at);
    instruction::wait_for_previous_kernel();  // weights do not depend on it, x does
    for (uint32_t i = 0; i < Form::kStages && x_at.left != 0; ++i, advance(x_at)) fetch_x(x_at);
    for (; at.left != 0; advance(at)) {
      instruction::wait_for_phase(empty(at.stage), at.parity() ^ 1);  // its last use is over
      fetch_weight(at);
      fetch_x(at);
    }
  }

  // A chunk of this warpgroup's strips.
  template <class F>
  __device__ __forceinline__ void multiply(SharedPlace own, Operands& a, Sums (&sums)[Form::kStrips],
                                           F&& after_previous) const {
    const uint32_t group = warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps;
    multiply_chunk<Operand, Form::kTokens, Form::kStrips>(
        own + group * kCodeBytes, own + Form::kGroups * kCodeBytes + group * kScaleBytes,
        own + Form::kWeightBytes, a, sums, after_previous);
  }

  // Slot of 32 lanes' float4: sums of a strip, of 8 tokens, of a warp.
  static __device__ __forceinline__ uint32_t slot_of(uint32_t strip, uint32_t tokens, uint32_t warp) {
    return (strip * (Form::kTokens / kTokenGroup) + tokens) * Form::kConsumerWarps + warp;
  }
  __device__ __forceinline__ void write_slot(uint32_t unit, uint32_t slot, const float4& sums) const {
    constexpr uint32_t kTokenGroups = Form::kTokens / kTokenGroup;
    const uint32_t of_warp = slot % Form::kConsumerWarps, tokens = slot / Form::kConsumerWarps % kTokenGroups,
                   strip = slot / (Form::kConsumerWarps * kTokenGroups);
    const uint32_t group = of_warp / kWarps * (kWarps * Form::kStrips) + strip * kWarps + of_warp % kWarps;
    write<T, Operand>(p.output, p.tokens, first_group_of(unit) + group,
                      unit % p.token_tiles * Form::kTokens + tokens * kTokenGroup, sums);
  }

  __device__ __forceinline__ void finish(uint32_t unit, const Sums (&sums)[Form::kStrips]) const {
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokens / kTokenGroup; ++i)
        write_slot(unit, slot_of(s, i, warp), float4_of(sums[s], i));
    }
  }

  // Equal ranges. Who begins a unit adds the parts of those that go on with it, in their order. They had the
  // unit first, so that nobody waits long.
  __device__ __forceinline__ void leave_part(const Sums (&sums)[Form::kStrips]) const {
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokens / kTokenGroup; ++i)
        *part_of(range, slot_of(s, i, warp)) = float4_of(sums[s], i);
    }
    __syncwarp();
    if (lane == 0) instruction::store_release(flag_of(range), 1);
  }
  __device__ __forceinline__ void add_parts(uint32_t unit, Sums (&sums)[Form::kStrips]) const {
    for (uint32_t other = range + 1; range_begin(other) < (unit + 1) * p.chunks; ++other) {
      while (instruction::load_acquire(flag_of(other)) == 0) {
      }
      __syncwarp();
#pragma unroll
      for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
        for (uint32_t i = 0; i < Form::kTokens / kTokenGroup; ++i) {
          const float4 more = __ldcg(part_of(other, slot_of(s, i, warp)));
          sums[s][4 * i] += more.x;
          sums[s][4 * i + 1] += more.y;
          sums[s][4 * i + 2] += more.z;
          sums[s][4 * i + 3] += more.w;
        }
      }
    }
  }
  __device__ __forceinline__ float4* part_of(uint32_t block, uint32_t slot) const {
    return p.parts + (size_t{block} * Form::kSlots + slot) * kLanes + lane;
  }
  __device__ __forceinline__ uint32_t* flag_of(uint32_t block) const {
    return p.flags + block * Form::kConsumerWarps + warp;
  }
  static __device__ __forceinline__ float4 float4_of(const Sums& sums, uint32_t i) {
    return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }

  // Sends each slot to the block that adds it up, one for each rank in turn, then adds up this block's.
  __device__ __forceinline__ void add_up_cluster(uint32_t unit, uint32_t turn,
                                                 const Sums (&sums)[Form::kStrips]) const {
    if (turn != 0) instruction::wait_for_phase<true>(parts_read(), (turn - 1) % 2);
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokens / kTokenGroup; ++i) {
        const uint32_t slot = slot_of(s, i, warp), place = slot / p.ranks;
        instruction::store_at_rank(part(place, rank), slot - place * p.ranks, float4_of(sums[s], i));
      }
    }
    __syncwarp();
    if (lane < p.ranks) instruction::arrive_at_rank(parts_here(), lane);
    instruction::wait_for_phase<true>(parts_here(), turn % 2);
    for (uint32_t place = warp; place * p.ranks + rank < Form::kSlots; place += Form::kConsumerWarps) {
      float4 sum = instruction::load_shared_floats(part(place, 0));
      for (uint32_t other = 1; other < p.ranks; ++other) {
        const float4 more = instruction::load_shared_floats(part(place, other));
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      write_slot(unit, place * p.ranks + rank, sum);
    }
    __syncwarp();
    if (lane < p.ranks) instruction::arrive_at_rank(parts_read(), lane);
  }
  __device__ __forceinline__ SharedPlace part(uint32_t place, uint32_t of_rank) const {
    return parts() + (place * p.ranks + of_rank) * Form::kSlotBytes + lane * 16;
  }

  __device__ __forceinline__ void consume() const {
    Operands a = {};
    Place at = first();
    for (uint32_t turn = 0; at.left != 0; ++turn) {
      Sums sums[Form::kStrips] = {};
      const uint32_t unit = at.unit, first_chunk = at.chunk;
      uint32_t previous = Form::kStages;
      do {
        instruction::wait_for_phase(full(at.stage), at.parity());
        multiply(__shfl_sync(~0u, stage(at.stage), 0), a, sums, [&] {
          if (previous != Form::kStages) free_stage(previous);
        });
        previous = at.stage;
        advance(at);
      } while (at.left != 0 && at.unit == unit);
      instruction::wait_for_products<0>();
      free_stage(previous);
      if constexpr (Form::kSplits) {
        add_up_cluster(unit, turn, sums);
      } else {
        if constexpr (Form::kRanges) {
          if (first_chunk != 0) {
            leave_part(sums);
            continue;
          }
          add_parts(unit, sums);
        }
        finish(unit, sums);
      }
    }
  }
  __device__ __forceinline__ void free_stage(uint32_t i) const {
    if (lane == 0) instruction::arrive(empty(i));
  }

  __device__ __forceinline__ void run() const {
    start();
    instruction::let_next_kernel_start();
    if (warp >= Form::kConsumerWarps) {
      if constexpr (Form::kMovesRegisters) instruction::give_registers<40>();
      if (threadIdx.x == Form::kConsumerWarps * kLanes) fetch();
      __syncwarp();
    } else {
      if constexpr (Form::kMovesRegisters) instruction::take_registers<232>();
      consume();
    }
    // Others may still write to this block's shared memory.
    if constexpr (Form::kSplits) instruction::cluster_barrier();
  }
};

#endif
}  // namespace nibble::warpgroup
