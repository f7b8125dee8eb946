// Many rows of activations times an NVFP4 weight on SM90: the decode kernel's weight as the register operand
// of a warpgroup's products. Layouts, order of work and measurements: docs/kernels/nvfp4_linear.md.
//
// A warpgroup has strips of 64 rows, four of the weight's groups, one for each warp. One thread fetches
// weights in bulk. x comes in bulk too where a kernel before this one has ordered it; for few tokens, up to
// four warps order it here. The others decode a quarter of a tile while the tensor cores multiply the one
// before. Blocks of a cluster share the columns; their sums meet in shared memory, in the order of ranks.
#pragma once

#include <type_traits>

#include "nibble/mma_operand.cuh"
#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_linear/warpgroup_form.h"
#include "nvfp4_linear/warpgroup_product.cuh"

namespace nibble::warpgroup {

struct Problem {
  CUtensorMap codes, scales;  // words of [groups, chunks, 256] and of [groups, chunks, 32]: weight.py
  const uint4* x;  // [tokens, columns] where a form orders x, else in order: warpgroup_form.h
  NormBefore norm;  // of forms with a norm before the product
  Output output;
  uint32_t tokens, columns, chunks, groups;
  uint32_t row_blocks, token_tiles, ranks;
  // Of equal ranges: a block's part of a unit that another began, [blocks, slots, 32], and whether it is
  // there, [blocks, warps]: zeros before the launch and after it.
  float4* parts;
  uint32_t* flags;
};

// A lane's part of bringing x into order: 8 columns of each quarter t of a token's chunk. Of a product's 16
// columns a lane of the weight has the pairs (32 t + 4 step) and (32 t + 4 step + 2).
__device__ __forceinline__ void load_quarters(const uint4* x, uint4 (&quarters)[4]) {
#pragma unroll
  for (uint32_t t = 0; t < 4; ++t) quarters[t] = __ldcg(x + t * 4);
}
// Zeros for quarters that are not there.
template <class F>
__device__ __forceinline__ void load_quarters(const uint4* x, uint4 (&quarters)[4], F&& is_there) {
#pragma unroll
  for (uint32_t t = 0; t < 4; ++t) quarters[t] = is_there(t) ? __ldcg(x + t * 4) : make_uint4(0, 0, 0, 0);
}
// The pieces of 16 bytes for the 8 first and 8 last columns of two products.
__device__ __forceinline__ uint4 ordered(const uint4 (&quarters)[4], uint32_t i) {
  return make_uint4(word(quarters[0], i), word(quarters[1], i), word(quarters[2], i), word(quarters[3], i));
}

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

template <class T, class Operand, class Form>
struct Multiplier {
  using Sums = float[Form::kSums];
  static constexpr uint32_t kEarly = Form::kOrdersX ? 2 : 1;  // stages that are filled before x is asked for
  static_assert(kEarly <= Form::kStages);

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
  // Of norms: factors for each token; every warp's sums of squares.
  __device__ __forceinline__ SharedPlace factors_here() const { return parts_read() + 8; }
  __device__ __forceinline__ SharedPlace squares_here() const { return factors_here() + 8; }
  // Of a token: its factor of the norm before the product, or a warp's sum of squares for the norm after it.
  __device__ __forceinline__ SharedPlace factor(uint32_t token) const {
    return barriers() + Form::kBarrierBytes + token * 4;
  }
  __device__ __forceinline__ SharedPlace squares_of(uint32_t of_warp, uint32_t token) const {
    return barriers() + Form::kBarrierBytes + (of_warp * Form::kTokens + token) * 4;
  }
  __device__ __forceinline__ SharedPlace parts() const {
    return barriers() + Form::kBarrierBytes + Form::kNormFloats * 4;
  }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      instruction::prefetch_map(p.codes);
      instruction::prefetch_map(p.scales);
      for (uint32_t i = 0; i < Form::kStages; ++i) {
        instruction::init_barrier(full(i), 1 + Form::kXWarps);
        instruction::init_barrier(empty(i), Form::kConsumerWarps);
      }
      instruction::init_barrier(parts_here(), 1);
      instruction::init_barrier(parts_read(), p.ranks * Form::kConsumerWarps);
      instruction::init_barrier(factors_here(), kWarps);
      instruction::init_barrier(squares_here(), Form::kConsumerWarps);
      instruction::publish_barriers();
    }
    __syncthreads();
    // The other blocks' barriers are needed when sums are exchanged.
    if constexpr (Form::kSplits) instruction::begin_cluster_barrier();
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
    return (p.token_tiles == 1 ? unit : unit / p.token_tiles) * Form::kGroups;
  }
  __device__ __forceinline__ void fetch_weight(const Place& at) const {
    const uint32_t first_group = first_group_of(at.unit);
    instruction::arrive_expecting(full(at.stage), Form::kOrdersX ? Form::kWeightBytes : Form::kStageBytes);
    instruction::copy_box(stage(at.stage), p.codes, at.chunk * (kCodeBytes / 4), first_group, full(at.stage));
    instruction::copy_box(stage(at.stage) + Form::kGroups * kCodeBytes, p.scales,
                          at.chunk * (kScaleBytes / 4), first_group, full(at.stage));
  }
  __device__ __forceinline__ void fetch_x(const Place& at) const {
    const size_t tile = size_t{at.unit % p.token_tiles} * p.chunks + at.chunk;
    instruction::copy_bulk(stage(at.stage) + Form::kWeightBytes, p.x + tile * (Form::kXBytes / 16),
                           Form::kXBytes, full(at.stage));
  }

  // Until a stage's last use is over.
  __device__ __forceinline__ void wait_for_stage(const Place& at) const {
    instruction::wait_for_phase(empty(at.stage), at.parity() ^ 1);
  }

  // Of the first use of stages [from, to), by one thread. Weights do not depend on the previous kernel, x
  // does. Only kEarly stages before it is over: x comes after all that is under way when it is asked for.
  __device__ __forceinline__ void fetch_weights(uint32_t from, uint32_t to) const {
    Place at = first();
    for (uint32_t i = 0; i < to && at.left != 0; ++i, advance(at)) {
      if (i >= from) fetch_weight(at);
    }
  }

  // One thread, where x is in order.
  __device__ __forceinline__ void fetch() const {
    fetch_weights(0, kEarly);
    instruction::wait_for_previous_kernel();
    Place at = first();
    for (uint32_t i = 0; at.left != 0; ++i, advance(at)) {
      if (i >= Form::kStages) wait_for_stage(at);
      if (i >= kEarly) fetch_weight(at);
      fetch_x(at);
    }
  }

  // What a warp that orders x loads next: a lane's part of its token, of a chunk.
  struct Source {
    uint32_t place, unit, chunk, left;
  };
  __device__ __forceinline__ uint32_t x_token() const {
    return (warp - Form::kConsumerWarps) * kTokenGroup + lane % kTokenGroup;
  }
  // In place of tokens past the last, the last one: nothing looks at their sums.
  __device__ __forceinline__ void find_place(Source& source) const {
    const uint32_t token = min(first_token_of(source.unit) + x_token(), p.tokens - 1);
    source.place = token * (p.columns / 8) + source.chunk * (kChunk / 8) + lane / kTokenGroup;
  }
  __device__ __forceinline__ void load_x(Source& source, uint4 (&x)[4]) const {
    const uint32_t columns = p.columns - source.chunk * kChunk;
    const uint4* const own = p.x + source.place;
    if (columns >= kChunk) {
      load_quarters(own, x);
    } else {
      load_quarters(own, x, [&](uint32_t t) { return t * 32 + lane / kTokenGroup * 8 < columns; });
    }
    source.place += kChunk / 8;
    --source.left;
    if (++source.chunk != end) return;
    source.chunk = begin;
    source.unit += clusters;
    find_place(source);
  }
  __device__ __forceinline__ void store_x(SharedPlace to, const uint4 (&x)[4]) const {
    const SharedPlace own = to + lane / kTokenGroup * (4 * Form::kTokens * 16) + x_token() * 16;
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k)
      instruction::store_shared(own + k * (Form::kTokens * 16), ordered(x, k));
  }

  // By the warps that order x. Loads are some chunks ahead, so that the second cache answers while others
  // multiply.
  __device__ __forceinline__ void fetch_and_order() const {
    constexpr uint32_t kAhead = 3;
    const bool fetches_weights = threadIdx.x == Form::kConsumerWarps * kLanes;
    Place at = first();
    Source source{{}, at.unit, at.chunk, at.left};
    find_place(source);
    const uint32_t fetched = at.left > Form::kStages ? at.left - Form::kStages : 0;
    if (source.left == 0) return;  // so that the divisions above are over before the wait
    uint4 x[kAhead][4];
    instruction::wait_for_previous_kernel();
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (source.left != 0) load_x(source, x[i]);
    }
    if (fetches_weights) fetch_weights(kEarly, Form::kStages);
    while (at.left != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (at.left == 0) break;
        wait_for_stage(at);
        if (fetches_weights && at.left <= fetched) fetch_weight(at);
        store_x(stage(at.stage) + Form::kWeightBytes, x[i]);
        instruction::publish_to_products();
        __syncwarp();
        if (lane == 0) instruction::arrive(full(at.stage));
        advance(at);
        if (source.left != 0) load_x(source, x[i]);
      }
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
    return (strip * Form::kTokenGroups + tokens) * Form::kConsumerWarps + warp;
  }
  // Of the output's, the group of a warp's strip and the first token.
  __device__ __forceinline__ uint32_t group_of(uint32_t unit, uint32_t strip, uint32_t warp) const {
    return first_group_of(unit) + warp / kWarps * (kWarps * Form::kStrips) + strip * kWarps + warp % kWarps;
  }
  __device__ __forceinline__ uint32_t first_token_of(uint32_t unit) const {
    return p.token_tiles == 1 ? 0 : unit % p.token_tiles * Form::kTokens;
  }

  __device__ __forceinline__ void finish(uint32_t unit, const Sums (&sums)[Form::kStrips]) const {
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
      write_all<T, Operand, Form::kTokenGroups, Form::kTokens, Form::kNorm>(
          p.output, p.tokens, group_of(unit, s, warp), first_token_of(unit),
          [&](uint32_t i) { return normed(float4_of(sums[s], i), i); },
          [&](uint32_t i, float squares) { add_squares(i, squares); });
    }
  }

  static constexpr bool kNormIsBefore = Form::kNorm == Norm::before, kNormIsAfter = Form::kNorm == Norm::after;
  __device__ __forceinline__ float shared_float(SharedPlace place) const {
    return __uint_as_float(instruction::load_shared_word(place));
  }

  // Each token's factor of the norm in front, by a warpgroup, while others multiply. A lane asks for four tokens'
  // sums of some blocks at once: they come after whatever the block asked for before.
  __device__ __forceinline__ void find_factors() const {
    constexpr uint32_t kFours = Form::kTokens / 4, kParts = kWarps * kLanes / kFours;
    const uint32_t thread = threadIdx.x - Form::kConsumerWarps * kLanes, fours = thread % kFours;
    instruction::wait_for_previous_kernel();
    const float4* const squares = reinterpret_cast<const float4*>(p.norm.squares) + fours;
    float4 sum = {};
#pragma unroll 16
    for (uint32_t block = thread / kFours; block < p.norm.parts; block += kParts) {
      const float4 more = __ldcg(squares + block * kFours);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
#pragma unroll
    for (uint32_t mask = kFours; mask < kLanes; mask *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, mask);
      sum.y += __shfl_xor_sync(~0u, sum.y, mask);
      sum.z += __shfl_xor_sync(~0u, sum.z, mask);
      sum.w += __shfl_xor_sync(~0u, sum.w, mask);
    }
    const auto part = [&](uint32_t i, uint32_t token) { return factor(Form::kTokens * (1 + i) + token); };
    if (lane < kFours)
      instruction::store_shared(part(warp - Form::kConsumerWarps, 4 * fours),
                                make_uint4(__float_as_uint(sum.x), __float_as_uint(sum.y),
                                           __float_as_uint(sum.z), __float_as_uint(sum.w)));
    instruction::meet_warpgroup(Form::kConsumerWarps / kWarps);
    if (thread < Form::kTokens) {
      float total = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kWarps; ++i) total += shared_float(part(i, thread));
      const float mean = total / static_cast<float>(p.columns);
      instruction::store_shared_word(factor(thread), __float_as_uint(rsqrtf(mean + p.norm.epsilon)));
    }
    __syncwarp();
    if (lane == 0) instruction::arrive(factors_here());
  }
  // Sums of a group of 8 tokens: a lane has tokens 2 c and 2 c + 1.
  __device__ __forceinline__ float4 normed(const float4& sums, uint32_t token_group) const {
    if constexpr (!kNormIsBefore) return sums;
    instruction::wait_for_phase(factors_here(), 0);
    const uint32_t token = token_group * kTokenGroup + lane % 4 * 2;
    const float a = shared_float(factor(token)), b = shared_float(factor(token + 1));
    return make_float4(sums.x * a, sums.y * b, sums.z * a, sums.w * b);
  }

  // Of the norm after the product: what `write` returned for a group of tokens. A warp adds up its own.
  __device__ __forceinline__ void start_squares() const {
    for (uint32_t token = lane; token < Form::kTokens; token += kLanes)
      instruction::store_shared_word(squares_of(warp, token), 0);
    __syncwarp();
  }
  __device__ __forceinline__ void add_squares(uint32_t token_group, float squares) const {
    if constexpr (!kNormIsAfter) return;
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    const SharedPlace sum = squares_of(warp, token_group * kTokenGroup + lane / 4);
    if (lane % 4 == 0) instruction::store_shared_word(sum, __float_as_uint(shared_float(sum) + squares));
  }
  __device__ __forceinline__ void finish_squares() const {
    __syncwarp();
    if (lane == 0) instruction::arrive(squares_here());
    if (threadIdx.x >= p.output.norm.tile) return;
    instruction::wait_for_phase(squares_here(), 0);
    float sum = 0.0f;
    for (uint32_t other = 0; other < Form::kConsumerWarps; ++other)
      sum += shared_float(squares_of(other, threadIdx.x));
    p.output.norm.squares[blockIdx.x * p.output.norm.tile + threadIdx.x] = sum;
  }

  // Equal ranges. Who begins a unit adds the parts of those that go on with it, in their order. They had the
  // unit first, so that nobody waits long.
  __device__ __forceinline__ void leave_part(const Sums (&sums)[Form::kStrips]) const {
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i)
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
      if (lane == 0) *flag_of(other) = 0;
#pragma unroll
      for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
        for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
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

  // Sends each slot to the block that adds it up, one for each rank in turn, then adds up this block's. After
  // the last unit no block waits for another: what all sent has come.
  __device__ __forceinline__ void add_up_cluster(uint32_t unit, uint32_t turn, bool is_last,
                                                 const Sums (&sums)[Form::kStrips]) const {
    if (turn == 0) {
      __syncwarp();
      instruction::end_cluster_barrier();
    } else {
      instruction::wait_for_phase<true>(parts_read(), (turn - 1) % 2);
    }
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
        const uint32_t slot = slot_of(s, i, warp), place = slot / p.ranks;
        instruction::store_at_rank(part(place, rank), slot - place * p.ranks, float4_of(sums[s], i),
                                   parts_here());
      }
    }
    if (threadIdx.x == 0) {
      const uint32_t own_slots = (Form::kSlots - rank + p.ranks - 1) / p.ranks;
      instruction::arrive_expecting(parts_here(), own_slots * p.ranks * Form::kSlotBytes);
    }
    __syncwarp();

    // Two ranks have the most slots each. What else the output needs is loaded while sums come.
    constexpr uint32_t kMost = quotient_up(Form::kSlots, 2 * Form::kConsumerWarps);
    const auto slot_at = [&](uint32_t i) { return (warp + i * Form::kConsumerWarps) * p.ranks + rank; };
    const auto token_group_of = [&](uint32_t slot) {
      return slot / Form::kConsumerWarps % Form::kTokenGroups;
    };
    const auto first_token_at = [&](uint32_t slot) {
      return first_token_of(unit) + token_group_of(slot) * kTokenGroup;
    };
    const auto group_at = [&](uint32_t slot) {
      return group_of(unit, slot / (Form::kConsumerWarps * Form::kTokenGroups), slot % Form::kConsumerWarps);
    };
    Addends addends[kMost];
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) {
      const uint32_t slot = slot_at(i);
      if (slot < Form::kSlots)
        addends[i] = addends_of<T, Form::kNorm>(p.output, p.tokens, group_at(slot), first_token_at(slot));
    }
    instruction::wait_for_phase<true>(parts_here(), turn % 2);
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) {
      const uint32_t slot = slot_at(i), place = warp + i * Form::kConsumerWarps;
      if (slot >= Form::kSlots) break;
      float4 sum = instruction::load_shared_floats(part(place, 0));
      for (uint32_t other = 1; other < p.ranks; ++other) {
        const float4 more = instruction::load_shared_floats(part(place, other));
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      const float squares = write<T, Operand, Form::kTokens, Form::kNorm>(
          p.output, p.tokens, group_at(slot), first_token_at(slot), normed(sum, token_group_of(slot)),
          factors_of<T>(p.output, group_at(slot)), addends[i]);
      add_squares(token_group_of(slot), squares);
    }
    if (is_last) return;
    __syncwarp();
    if (lane < p.ranks) instruction::arrive_at_rank(parts_read(), lane);
  }
  __device__ __forceinline__ SharedPlace part(uint32_t place, uint32_t of_rank) const {
    return parts() + (place * p.ranks + of_rank) * Form::kSlotBytes + lane * 16;
  }

  __device__ __forceinline__ void consume() const {
    Operands a = {};
    Place at = first();
    if constexpr (kNormIsAfter) start_squares();
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
        add_up_cluster(unit, turn, at.left == 0, sums);
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
    if constexpr (kNormIsAfter) finish_squares();
  }
  __device__ __forceinline__ void free_stage(uint32_t i) const {
    if (lane == 0) instruction::arrive(empty(i));
  }

  __device__ __forceinline__ void run() const {
    start();
    instruction::let_next_kernel_start();
    if (warp < Form::kConsumerWarps) {
      if constexpr (Form::kMovesRegisters) instruction::take_registers<232>();
      if (Form::kOrdersX && threadIdx.x == 0) fetch_weights(0, kEarly);  // x is loaded meanwhile
      __syncwarp();
      return consume();
    }
    if constexpr (Form::kMovesRegisters) instruction::give_registers<40>();
    if constexpr (Form::kOrdersX) {
      fetch_and_order();
    } else {
      if (threadIdx.x == Form::kFetchWarp * kLanes) fetch();
      if constexpr (kNormIsBefore) {
        if (warp < Form::kFetchWarp) find_factors();
      }
    }
    __syncwarp();
    if constexpr (Form::kSplits) instruction::end_cluster_barrier();
  }
};

#endif
}  // namespace nibble::warpgroup
