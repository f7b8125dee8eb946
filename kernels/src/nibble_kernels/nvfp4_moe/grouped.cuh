// Experts for any number of tokens on SM90: both products of all experts in one launch. Order of work and
// measurements: docs/kernels/nvfp4_linear.md.
//
// A unit is some groups of an expert's weight by a tile of its tokens, over all columns: first all units of
// w13, then those of w2. Thread blocks take units from a queue. One thread fetches weights and x in bulk, so
// that copies never drain between units; the other warps decode and multiply. The second product's units
// begin when a counter says that the tile's intermediate is complete. No sum is shared by thread blocks, so
// that a row's bits depend on its form alone.
#pragma once

#include <type_traits>

#include "nibble/mma_operand.cuh"
#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_linear/warpgroup_product.cuh"
#include "nvfp4_moe/activation.cuh"
#include "nvfp4_moe/grouped_form.h"

namespace nibble::experts {

using decode::Fragment;
using decode::kGroup;
using decode::kPieces;
using instruction::SharedPlace;
using warpgroup::load_tile;
using warpgroup::pair_of;
using warpgroup::to_float;
using warpgroup::word;

// One weight of every expert: weight.py.
struct Weight {
  CUtensorMap codes, scales;   // words of [experts · groups, chunks, 256] and of [experts · groups, chunks, 32]
  const float2* global_scales;  // of the upper and of the lower half of an expert's rows
  const void* bias;             // [experts, outputs], or null
  uint32_t outputs, chunks, groups, row_blocks;
};

struct Problem {
  Weight first, second;
  const uint4* x;   // [tiles, padded chunks, a tile's chunk]: Form::word_of
  uint32_t* inner;  // the intermediate, likewise
  void* products;   // [pairs, outputs of w2], times the router's weights
  const Tile* tiles;
  const uint32_t* tile_count;
  const uint32_t* pairs;       // in the order of tiles
  const float* weights;        // in the order of tiles
  uint32_t *queue, *complete;  // units taken; warps that are through with a tile's intermediate, [tiles]
  Activation activation;
};

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

constexpr uint32_t kNoUnit = ~0u;

template <class T, class Operand, class Form>
struct Multiplier {
  using Sums = float[Form::kStrips][Form::kSums];
  using Operands = warpgroup::Operands;

  const Problem& p;
  const SharedPlace shared;  // [stages]: codes [tiles], scales [tiles], x; parts, barriers, units
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

  __device__ __forceinline__ SharedPlace stage(uint32_t i) const { return shared + i * Form::kStageBytes; }
  __device__ __forceinline__ SharedPlace parts() const { return shared + Form::kStages * Form::kStageBytes; }
  __device__ __forceinline__ SharedPlace full(uint32_t i) const {
    return parts() + 2 * Form::kPartBytes + i * 8;
  }
  __device__ __forceinline__ SharedPlace empty(uint32_t i) const { return full(Form::kStages + i); }
  __device__ __forceinline__ SharedPlace parts_here() const { return full(2 * Form::kStages); }
  __device__ __forceinline__ SharedPlace unit_place(uint32_t i) const {
    return full(2 * Form::kStages + 1) + i * 4;
  }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < Form::kStages; ++i) {
        instruction::init_barrier(full(i), 1);
        instruction::init_barrier(empty(i), Form::kConsumerWarps);
      }
      instruction::init_barrier(parts_here(), Form::kConsumerWarps);
      instruction::publish_barriers();
    }
    __syncthreads();
  }

  // Bit i of `phases` is the parity of the phase in which stage i is filled.
  struct Place {
    uint32_t stage = 0, phases = 0;
    __device__ __forceinline__ uint32_t parity() const { return phases >> stage & 1; }
    __device__ __forceinline__ void advance() {
      phases ^= 1u << stage;
      if (++stage == Form::kStages) stage = 0;
    }
  };

  struct Unit {
    bool is_second;
    uint32_t tile, row_block;
  };
  __device__ __forceinline__ Unit unit_of(uint32_t number, uint32_t tiles) const {
    const uint32_t first_units = tiles * p.first.row_blocks;
    const bool is_second = number >= first_units;
    const uint32_t blocks = is_second ? p.second.row_blocks : p.first.row_blocks;
    const uint32_t place = is_second ? number - first_units : number;
    return {is_second, place / blocks, place % blocks};
  }
  __device__ __forceinline__ const Weight& weight_of(const Unit& unit) const {
    return unit.is_second ? p.second : p.first;
  }

  __device__ __forceinline__ void fetch_weight(const Weight& weight, uint32_t step, uint32_t row,
                                               uint32_t number, uint32_t at) const {
    instruction::store_shared_word(unit_place(at), number);
    instruction::arrive_expecting(full(at), Form::kStageBytes);
    instruction::copy_box(stage(at), weight.codes, 0, step * Form::kSplit, row, full(at));
    instruction::copy_box(stage(at) + Form::kTiles * kCodeBytes, weight.scales, 0, step * Form::kSplit, row,
                          full(at));
  }
  __device__ __forceinline__ void fetch_x(const uint4* x, uint32_t step, uint32_t at) const {
    constexpr uint32_t kBytes = Form::kSplit * Form::kXBytes;
    instruction::copy_bulk(stage(at) + Form::kWeightBytes, x + size_t{step} * (kBytes / 16), kBytes,
                           full(at));
  }
  __device__ __forceinline__ void wait_for_stage(const Place& at) const {
    instruction::wait_for_phase(empty(at.stage), at.parity() ^ 1);
  }

  // One thread.
  __device__ __forceinline__ void fetch() const {
    const uint32_t tiles = __ldcg(p.tile_count),
                   units = tiles * (p.first.row_blocks + p.second.row_blocks);
    Place at;
    uint32_t number = blockIdx.x, next = number < units ? take_unit() : number;
    uint32_t expert = number < units ? __ldcg(&p.tiles[unit_of(number, tiles).tile].expert) : 0;
    while (number < units) {
      // Ahead of their use: answers take as long as a stage.
      const uint32_t after = next < units ? take_unit() : next;
      const uint32_t next_expert = next < units ? __ldcg(&p.tiles[unit_of(next, tiles).tile].expert) : 0;
      fetch_unit(number, unit_of(number, tiles), expert, at);
      number = next;
      next = after;
      expert = next_expert;
    }
    wait_for_stage(at);
    instruction::store_shared_word(unit_place(at.stage), kNoUnit);
    instruction::arrive(full(at.stage));
  }
  __device__ __forceinline__ uint32_t take_unit() const { return gridDim.x + atomicAdd(p.queue, 1u); }

  __device__ __forceinline__ void fetch_unit(uint32_t number, const Unit& unit, uint32_t expert,
                                             Place& at) const {
    const Weight& weight = weight_of(unit);
    const uint32_t row = expert * weight.groups + unit.row_block * Form::kGroups;
    const uint32_t chunks = Form::padded(weight.chunks), steps = chunks / Form::kSplit;
    const uint4* const x = (unit.is_second ? reinterpret_cast<const uint4*>(p.inner) : p.x) +
                           size_t{unit.tile} * chunks * (Form::kXBytes / 16);
    uint32_t step = 0;
    if (unit.is_second) {
      const uint32_t all = p.first.row_blocks * Form::kConsumerWarps;
      if (!instruction::has_reached(p.complete + unit.tile, all)) {
        Place ahead = at;  // weights depend on nobody
        for (; step < steps && step < Form::kStages; ++step, ahead.advance()) {
          wait_for_stage(ahead);
          fetch_weight(weight, step, row, number, ahead.stage);
        }
        instruction::wait_until_reached(p.complete + unit.tile, all);
      }
      instruction::publish_to_copies();
      for (uint32_t i = 0; i < step; ++i, at.advance()) fetch_x(x, i, at.stage);
    }
    for (; step < steps; ++step, at.advance()) {
      wait_for_stage(at);
      fetch_weight(weight, step, row, number, at.stage);
      fetch_x(x, step, at.stage);
    }
  }

  // A chunk of a warp's group.
  __device__ __forceinline__ void multiply_warp(SharedPlace own, Sums& sums) const {
    const Fragment tile =
        load_tile(own + warp * kCodeBytes, own + Form::kTiles * kCodeBytes + warp * kScaleBytes);
    const SharedPlace x = own + Form::kWeightBytes + warp % Form::kSplit * Form::kXBytes + lane * 16;
    uint32_t scales[4];
    Operand::scales(tile.scales, scales);
    float (&all)[Form::kTokenGroups][4] = reinterpret_cast<float (&)[Form::kTokenGroups][4]>(sums);
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint4 b[Form::kTokenGroups];
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i)
        b[i] = instruction::load_shared(x + piece * (Form::kTokens * 64) + i * (kTokenGroup * 64));
      uint32_t a[2][4];
      warpgroup::decode_piece<Operand>(word(tile.upper, piece), word(tile.lower, piece), scales[piece / 2],
                                       scales[2 + piece / 2], a);
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
        Operand::mma(all[i], a[0][0], a[0][1], a[0][2], a[0][3], b[i].x, b[i].y);
        Operand::mma(all[i], a[1][0], a[1][1], a[1][2], a[1][3], b[i].z, b[i].w);
      }
    }
  }

  // What a lane needs to write 8 tokens of a unit. Of tokens past the last, the last.
  struct Rows {
    uint32_t pair;  // of the token whose columns the lane writes
    float first_weight, second_weight;  // of the tokens whose sums it has
  };
  __device__ __forceinline__ Rows rows_of(const Tile& tile, uint32_t group) const {
    const auto place = [&](uint32_t token) { return tile.first + min(group * kTokenGroup + token, tile.count - 1); };
    return {__ldcg(p.pairs + place(lane / 4)), __ldcg(p.weights + place(lane % 4 * 2)),
            __ldcg(p.weights + place(lane % 4 * 2 + 1))};
  }

  struct Target {
    Unit unit;
    Tile tile;
    float2 global_scale;
  };

  __device__ __forceinline__ Target target_of(uint32_t number, uint32_t tiles) const {
    const Unit unit = unit_of(number, tiles);
    const uint4 tile = __ldcg(reinterpret_cast<const uint4*>(p.tiles + unit.tile));
    return {unit, {tile.x, tile.y, tile.z, 0}, __ldg(weight_of(unit).global_scales + tile.x)};
  }

  __device__ __forceinline__ void write(const Target& to, uint32_t group, uint32_t token_group,
                                        const float4& sums, const Rows& rows) const {
    const Weight& weight = weight_of(to.unit);
    const uint32_t half = weight.outputs / 2, upper = group * kGroup + lane / 4;
    const auto bias = [&](uint32_t row) {
      if (!weight.bias || upper >= half) return 0.0f;
      return to_float(static_cast<const T*>(weight.bias)[size_t{to.tile.expert} * weight.outputs + row]);
    };
    const float upper_bias = bias(upper), lower_bias = bias(upper + half);
    const float y0 = sums.x * Operand::kUnit * to.global_scale.x + upper_bias,
                y1 = sums.y * Operand::kUnit * to.global_scale.x + upper_bias,
                z0 = sums.z * Operand::kUnit * to.global_scale.y + lower_bias,
                z1 = sums.w * Operand::kUnit * to.global_scale.y + lower_bias;
    // Lanes then have two neighbouring rows of one token.
    const uint32_t token = token_group * kTokenGroup + lane / 4, row = group * kGroup + lane % 4 * 2;
    const bool writes = token < to.tile.count && row < half;
    if (!to.unit.is_second) return write_inner(to, half, token, row, writes, y0, y1, z0, z1);
    const float v = rows.first_weight, w = rows.second_weight;
    const uint32_t pair = instruction::transpose_pairs(pair_of(T(), y0 * v, y1 * w));
    const uint32_t other = instruction::transpose_pairs(pair_of(T(), z0 * v, z1 * w));
    if (!writes) return;
    T* const out = static_cast<T*>(p.products) + size_t{rows.pair} * weight.outputs + row;
    *reinterpret_cast<uint32_t*>(out) = pair;
    *reinterpret_cast<uint32_t*>(out + half) = other;
  }

  __device__ __forceinline__ void write_inner(const Target& to, uint32_t half, uint32_t token, uint32_t row,
                                              bool writes, float y0, float y1, float z0, float z1) const {
    const auto place = [&](uint32_t column) {
      const size_t chunk = size_t{to.unit.tile} * Form::padded(p.second.chunks) + column / kChunk;
      return p.inner + chunk * (Form::kXBytes / 4) + Form::word_of(token, column);
    };
    const Activation& f = p.activation;
    if (f.gated) {
      const uint32_t pair = instruction::transpose_pairs(pair_of(T(), f(y0, z0), f(y1, z1)));
      if (writes) *place(row) = pair;
      return;
    }
    const uint32_t pair = instruction::transpose_pairs(pair_of(T(), f(y0), f(y1)));
    const uint32_t other = instruction::transpose_pairs(pair_of(T(), f(z0), f(z1)));
    if (!writes) return;
    *place(row) = pair;
    *place(row + half) = other;
  }

  static __device__ __forceinline__ float4 float4_of(const float (&sums)[Form::kSums], uint32_t i) {
    return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }

  // Few tokens: where sums go is known before they are. With many that takes too many registers.
  static constexpr bool kKeepsRows = Form::kTokenGroups <= 2;

  template <class RowsOf>
  __device__ __forceinline__ void finish(const Target& to, const Sums& sums, RowsOf&& rows) const {
    const uint32_t first_group = to.unit.row_block * Form::kGroups + (Form::kWarpgroup
        ? warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps : warp);
#pragma unroll
    for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i)
        write(to, first_group + s * kWarps, i, float4_of(sums[s], i), rows(i));
    }
  }

  // Adds up what the warps that share a group have, in the order of their columns.
  template <class RowsOf>
  __device__ __forceinline__ void finish_split(const Target& to, uint32_t turn, const Sums& sums,
                                               RowsOf&& rows) const {
    const SharedPlace own = parts() + turn % 2 * Form::kPartBytes + lane * 16;
    constexpr uint32_t kSlot = kLanes * 16;
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
      const float4 part = float4_of(sums[0], i);
      instruction::store_shared(own + (warp * Form::kTokenGroups + i) * kSlot,
                                make_uint4(__float_as_uint(part.x), __float_as_uint(part.y),
                                           __float_as_uint(part.z), __float_as_uint(part.w)));
    }
    __syncwarp();
    if (lane == 0) instruction::arrive(parts_here());
    instruction::wait_for_phase(parts_here(), turn % 2);
    if (warp >= Form::kGroups) return;
#pragma unroll
    for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (uint32_t other = 0; other < Form::kSplit; ++other) {
        const uint32_t slot = (warp * Form::kSplit + other) * Form::kTokenGroups + i;
        const float4 more = instruction::load_shared_floats(own + slot * kSlot);
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      write(to, to.unit.row_block * Form::kGroups + warp, i, sum, rows(i));
    }
  }

  template <class F>
  __device__ __forceinline__ void multiply(SharedPlace own, Operands& a, Sums& sums,
                                           F&& after_previous) const {
    if constexpr (Form::kWarpgroup) {
      const uint32_t group = warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps;
      warpgroup::multiply_chunk<Operand, Form::kTokens, Form::kStrips>(
          own + group * kCodeBytes, own + Form::kTiles * kCodeBytes + group * kScaleBytes,
          own + Form::kWeightBytes, a, sums, after_previous);
    } else {
      multiply_warp(own, sums);
    }
  }

  __device__ __forceinline__ void free_stage(uint32_t i) const {
    if (lane == 0) instruction::arrive(empty(i));
  }

  __device__ __forceinline__ void consume() const {
    const uint32_t tiles = __ldcg(p.tile_count);
    Operands a = {};
    Place at;
    for (uint32_t turn = 0;; ++turn) {
      instruction::wait_for_phase(full(at.stage), at.parity());
      const uint32_t number = __shfl_sync(~0u, instruction::load_shared_word(unit_place(at.stage)), 0);
      if (number == kNoUnit) return;
      Target to = {};
      Rows kept[kKeepsRows ? Form::kTokenGroups : 1] = {};
      if constexpr (kKeepsRows) {
        to = target_of(number, tiles);
        if (to.unit.is_second) {
#pragma unroll
          for (uint32_t i = 0; i < Form::kTokenGroups; ++i) kept[i] = rows_of(to.tile, i);
        }
      }
      const uint32_t chunks = weight_of(unit_of(number, tiles)).chunks;
      Sums sums = {};
      const uint32_t steps = quotient_up(chunks, Form::kSplit);
      uint32_t previous = Form::kStages;  // in use until the next chunk's first products have begun
      for (uint32_t step = 0; step < steps; ++step) {
        if (step != 0) instruction::wait_for_phase(full(at.stage), at.parity());
        if (Form::kSplit == 1 || step * Form::kSplit + warp % Form::kSplit < chunks) {
          multiply(__shfl_sync(~0u, stage(at.stage), 0), a, sums, [&] {
            if (previous != Form::kStages) free_stage(previous);
          });
        }
        previous = at.stage;
        if constexpr (!Form::kWarpgroup) {
          __syncwarp();
          free_stage(previous);
        }
        at.advance();
      }
      if constexpr (Form::kWarpgroup) {
        instruction::wait_for_products<0>();
        free_stage(previous);
      }
      if constexpr (!kKeepsRows) to = target_of(number, tiles);
      const auto rows = [&](uint32_t i) {
        if constexpr (kKeepsRows) return kept[i];
        return to.unit.is_second ? rows_of(to.tile, i) : Rows{};
      };
      if constexpr (Form::kSplit > 1) {
        finish_split(to, turn, sums, rows);
      } else {
        finish(to, sums, rows);
      }
      if (!to.unit.is_second) {
        instruction::publish_to_copies();
        __syncwarp();
        if (lane == 0) instruction::add_release(p.complete + to.unit.tile);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    start();
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
    if (warp >= Form::kConsumerWarps) {
      if constexpr (Form::kMovesRegisters) instruction::give_registers<56>();
      if (threadIdx.x == Form::kConsumerWarps * kLanes) fetch();
      __syncwarp();
    } else {
      if constexpr (Form::kMovesRegisters) instruction::take_registers<224>();
      consume();
    }
  }
};

#endif
}  // namespace nibble::experts
