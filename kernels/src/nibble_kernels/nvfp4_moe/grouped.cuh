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
#include "nvfp4_moe/grouped_problem.cuh"

namespace nibble::experts {

using decode::Fragment;
using decode::kGroup;
using decode::kPieces;
using instruction::SharedPlace;
using warpgroup::load_tile;
using warpgroup::pair_of;
using warpgroup::to_float;
using warpgroup::word;

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

constexpr uint32_t kNoUnit = ~0u;

template <class T, class Operand, class Form>
struct Multiplier {
  using Sums = float[Form::kStrips][Form::kSums];
  using Operands = warpgroup::Operands;

  const Problem& p;
  const SharedPlace shared;  // [stages]: codes [groups], scales [groups], x; then units, barriers, slots
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

  __device__ __forceinline__ SharedPlace stage(uint32_t i) const { return shared + i * Form::kStageBytes; }
  __device__ __forceinline__ SharedPlace unit_place(uint32_t i) const {
    return stage(Form::kStages) + i * 16;
  }
  __device__ __forceinline__ SharedPlace full(uint32_t i) const { return unit_place(Form::kStages) + i * 8; }
  __device__ __forceinline__ SharedPlace empty(uint32_t i) const { return full(Form::kStages + i); }
  __device__ __forceinline__ SharedPlace written(uint32_t i) const { return full(2 * Form::kStages + i); }
  __device__ __forceinline__ SharedPlace announced(uint32_t i) const { return written(kSlots + i); }
  __device__ __forceinline__ SharedPlace slot_place(uint32_t i) const { return written(2 * kSlots) + i * 4; }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < Form::kStages; ++i) {
        instruction::init_barrier(full(i), 1);
        instruction::init_barrier(empty(i), Form::kConsumerWarps);
      }
      for (uint32_t i = 0; i < kSlots; ++i) {
        instruction::init_barrier(written(i), Form::kConsumerWarps);
        instruction::init_barrier(announced(i), 1);
      }
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
  __device__ __forceinline__ Tile tile_of(uint32_t tile) const {
    const uint4 found = __ldcg(reinterpret_cast<const uint4*>(p.tiles + tile));
    return {found.x, found.y, found.z, 0};
  }
  // A unit and its tile, as the fetching thread tells the others.
  static __device__ __forceinline__ uint4 message_of(const Unit& unit, const Tile& tile) {
    return make_uint4(unit.tile | uint32_t{unit.is_second} << 31, unit.row_block | tile.expert << 16,
                      tile.first, tile.count);
  }

  __device__ __forceinline__ void fetch_weight(const Weight& weight, uint32_t step, uint32_t row,
                                               const uint4& message, uint32_t at) const {
    instruction::store_shared(unit_place(at), message);
    instruction::arrive_expecting(full(at), Form::kStageBytes);
    instruction::copy_box(stage(at), weight.codes, 0, step, row, full(at));
    instruction::copy_box(stage(at) + Form::kGroups * kCodeBytes, weight.scales, 0, step, row, full(at));
  }
  __device__ __forceinline__ void fetch_x(const uint4* x, uint32_t step, uint32_t at) const {
    instruction::copy_bulk(stage(at) + Form::kWeightBytes, x + size_t{step} * (Form::kXBytes / 16),
                           Form::kXBytes, full(at));
  }
  __device__ __forceinline__ void wait_for_stage(const Place& at) const {
    instruction::wait_for_phase(empty(at.stage), at.parity() ^ 1);
  }

  // One thread. A block's first two units are given, so that what the queue answers is known before it is
  // needed: that takes as long as a stage, and so does the look at a tile.
  __device__ __forceinline__ void fetch() const {
    uint32_t number = blockIdx.x, next = gridDim.x + blockIdx.x;
    const uint32_t guess = number / p.first.row_blocks;
    Tile tile = tile_of(guess < p.most_tiles ? guess : 0);
    const uint32_t tiles = __ldcg(p.tile_count), units = tiles * (p.first.row_blocks + p.second.row_blocks);
    if (number < units && unit_of(number, tiles).is_second) tile = tile_of(unit_of(number, tiles).tile);
    Place at;
    while (number < units) {
      const uint32_t after = 2 * gridDim.x + atomicAdd(p.queue, 1u);
      Tile next_tile{};
      if (next < units) next_tile = tile_of(unit_of(next, tiles).tile);
      fetch_unit(unit_of(number, tiles), tile, at);
      number = next;
      next = after;
      tile = next_tile;
    }
    wait_for_stage(at);
    instruction::store_shared(unit_place(at.stage), make_uint4(kNoUnit, 0, 0, 0));
    instruction::arrive(full(at.stage));
  }

  __device__ __forceinline__ void fetch_unit(const Unit& unit, const Tile& tile, Place& at) const {
    const Weight& weight = weight_of(unit);
    const uint4 message = message_of(unit, tile);
    const uint32_t row = tile.expert * weight.groups + unit.row_block * Form::kGroups;
    const uint32_t steps = weight.chunks;
    const uint4* const x = (unit.is_second ? reinterpret_cast<const uint4*>(p.inner) : p.x) +
                           size_t{unit.tile} * steps * (Form::kXBytes / 16);
    uint32_t step = 0;
    if (unit.is_second) {
      if (!instruction::has_reached(p.complete + unit.tile, p.first.row_blocks)) {
        Place ahead = at;  // weights depend on nobody
        for (; step < steps && step < Form::kStages; ++step, ahead.advance()) {
          wait_for_stage(ahead);
          fetch_weight(weight, step, row, message, ahead.stage);
        }
        instruction::wait_until_reached(p.complete + unit.tile, p.first.row_blocks);
      }
      instruction::publish_to_copies();
      for (uint32_t i = 0; i < step; ++i, at.advance()) fetch_x(x, i, at.stage);
    }
    for (; step < steps; ++step, at.advance()) {
      wait_for_stage(at);
      fetch_weight(weight, step, row, message, at.stage);
      fetch_x(x, step, at.stage);
    }
  }

  // One thread of another warp tells other blocks what has been written: that waits for the writes.
  __device__ __forceinline__ void announce() const {
    for (uint32_t turn = 0;; ++turn) {
      const uint32_t slot = turn % kSlots;
      instruction::wait_for_phase(written(slot), turn / kSlots % 2);
      const uint32_t tile = instruction::load_shared_word(slot_place(slot));
      if (tile == kNoUnit) return;
      instruction::publish_to_copies();
      instruction::add_release(p.complete + tile);
      instruction::arrive(announced(slot));
    }
  }
  // By every consuming warp, after it has written its part of the `turn`th tile.
  __device__ __forceinline__ void let_announce(uint32_t turn, uint32_t tile) const {
    const uint32_t slot = turn % kSlots;
    __syncwarp();
    if (lane != 0) return;
    instruction::wait_for_phase(announced(slot), turn / kSlots % 2 ^ 1);
    if (warp == 0) instruction::store_shared_word(slot_place(slot), tile);
    instruction::arrive(written(slot));
  }

  // A chunk of a warp's group.
  __device__ __forceinline__ void multiply_warp(SharedPlace own, Sums& sums) const {
    const Fragment tile =
        load_tile(own + warp * kCodeBytes, own + Form::kGroups * kCodeBytes + warp * kScaleBytes);
    const SharedPlace x = own + Form::kWeightBytes + lane * 16;
    uint32_t scales[4];
    Operand::scales(tile.scales, scales);
    float(&all)[Form::kTokenGroups][4] = reinterpret_cast<float(&)[Form::kTokenGroups][4]>(sums);
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
    uint32_t pair;                      // of the token whose columns the lane writes
    float first_weight, second_weight;  // of the tokens whose sums it has
  };
  __device__ __forceinline__ Rows rows_of(const Tile& tile, uint32_t group) const {
    const auto place = [&](uint32_t token) {
      return tile.first + min(group * kTokenGroup + token, tile.count - 1);
    };
    return {__ldcg(p.pairs + place(lane / 4)), __ldcg(p.weights + place(lane % 4 * 2)),
            __ldcg(p.weights + place(lane % 4 * 2 + 1))};
  }

  struct Target {
    Unit unit;
    Tile tile;
    float2 factor;  // of the upper and of the lower half's rows
  };

  __device__ __forceinline__ Target target_of(const uint4& message) const {
    const Unit unit{message.x >> 31 != 0, message.x & 0x7fffffff, message.y & 0xffff};
    const Tile tile{message.y >> 16, message.z, message.w, 0};
    const float2 scale = __ldg(weight_of(unit).global_scales + tile.expert);
    return {unit, tile, make_float2(scale.x * Operand::kUnit, scale.y * Operand::kUnit)};
  }

  template <class F>
  __device__ __forceinline__ void write(const Target& to, uint32_t group, uint32_t token_group,
                                        const float4& sums, const Rows& rows, const F& activation) const {
    const Weight& weight = weight_of(to.unit);
    const uint32_t half = weight.outputs / 2, upper = group * kGroup + lane / 4;
    float y0 = sums.x * to.factor.x, y1 = sums.y * to.factor.x, z0 = sums.z * to.factor.y,
          z1 = sums.w * to.factor.y;
    if (weight.bias && upper < half) {
      const T* const bias =
          static_cast<const T*>(weight.bias) + size_t{to.tile.expert} * weight.outputs + upper;
      const float upper_bias = to_float(bias[0]), lower_bias = to_float(bias[half]);
      y0 += upper_bias;
      y1 += upper_bias;
      z0 += lower_bias;
      z1 += lower_bias;
    }
    // Lanes then have two neighbouring rows of one token.
    const uint32_t token = token_group * kTokenGroup + lane / 4, row = group * kGroup + lane % 4 * 2;
    const bool writes = token < to.tile.count && row < half;
    if (!to.unit.is_second) {
      const auto place = [&](uint32_t column) {
        const size_t chunk = size_t{to.unit.tile} * p.second.chunks + column / kChunk;
        return p.inner + chunk * (Form::kXBytes / 4) + Form::word_of(token, column);
      };
      if (p.activation.gated) {
        const uint32_t pair =
            instruction::transpose_pairs(pair_of(T(), activation(y0, z0), activation(y1, z1)));
        if (writes) *place(row) = pair;
        return;
      }
      const uint32_t pair = instruction::transpose_pairs(pair_of(T(), activation(y0), activation(y1)));
      const uint32_t other = instruction::transpose_pairs(pair_of(T(), activation(z0), activation(z1)));
      if (!writes) return;
      *place(row) = pair;
      *place(row + half) = other;
      return;
    }
    const float v = rows.first_weight, w = rows.second_weight;
    const uint32_t pair = instruction::transpose_pairs(pair_of(T(), y0 * v, y1 * w));
    const uint32_t other = instruction::transpose_pairs(pair_of(T(), z0 * v, z1 * w));
    if (!writes) return;
    T* const out = static_cast<T*>(p.products) + size_t{rows.pair} * weight.outputs + row;
    *reinterpret_cast<uint32_t*>(out) = pair;
    *reinterpret_cast<uint32_t*>(out + half) = other;
  }

  static __device__ __forceinline__ float4 float4_of(const float (&sums)[Form::kSums], uint32_t i) {
    return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }

  // Of 8 tokens each; with few tokens, where sums go is known before they are.
  static constexpr uint32_t kMostAtOnce = Form::kBlocks == 1 ? 4 : 2;
  static constexpr uint32_t kBatch = Form::kTokenGroups < kMostAtOnce ? Form::kTokenGroups : kMostAtOnce;
  static constexpr uint32_t kBatches = Form::kTokenGroups / kBatch;
  static constexpr bool kKeepsRows = Form::kTokenGroups <= 2;
  using SomeRows = Rows[kBatch];
  __device__ __forceinline__ void find_rows(const Target& to, uint32_t batch, SomeRows& rows) const {
    if (!to.unit.is_second) return;
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) rows[i] = rows_of(to.tile, batch * kBatch + i);
  }

  __device__ __forceinline__ void finish(const Target& to, const Sums& sums, const SomeRows& first) const {
    // One decision for all sums: most models have this one.
    if (p.activation.is_plain()) return finish_as(to, sums, first, SiluMul());
    finish_as(to, sums, first, p.activation);
  }
  template <class F>
  __device__ __forceinline__ void finish_as(const Target& to, const Sums& sums, const SomeRows& first,
                                            const F& activation) const {
    const uint32_t own = Form::kWarpgroup ? warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps : warp;
    SomeRows rows[2];
    if constexpr (kKeepsRows) {
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) rows[0][i] = first[i];
    } else {
      find_rows(to, 0, rows[0]);
    }
#pragma unroll
    for (uint32_t batch = 0; batch < kBatches; ++batch) {
      if (batch * kBatch * kTokenGroup >= to.tile.count) break;
      // The next ones are looked up before anything is written: the compiler keeps that order.
      if (batch + 1 < kBatches) find_rows(to, batch + 1, rows[(batch + 1) % 2]);
#pragma unroll
      for (uint32_t s = 0; s < Form::kStrips; ++s) {
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          write(to, to.unit.row_block * Form::kGroups + own + s * kWarps, batch * kBatch + i,
                float4_of(sums[s], batch * kBatch + i), rows[batch % 2][i], activation);
        }
      }
    }
  }

  template <class F>
  __device__ __forceinline__ void multiply(SharedPlace own, Operands& a, Sums& sums,
                                           F&& after_previous) const {
    if constexpr (Form::kWarpgroup) {
      const uint32_t group = warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps;
      warpgroup::multiply_chunk<Operand, Form::kTokens, Form::kStrips>(
          own + group * kCodeBytes, own + Form::kGroups * kCodeBytes + group * kScaleBytes,
          own + Form::kWeightBytes, a, sums, after_previous);
    } else {
      multiply_warp(own, sums);
    }
  }

  __device__ __forceinline__ void free_stage(uint32_t i) const {
    if (lane == 0) instruction::arrive(empty(i));
  }

  __device__ __forceinline__ void consume() const {
    Operands a = {};
    Place at;
    for (uint32_t turn = 0;;) {
      instruction::wait_for_phase(full(at.stage), at.parity());
      const uint4 message = instruction::load_shared(unit_place(at.stage));
      if (message.x == kNoUnit) return let_announce(turn, kNoUnit);
      Target to = target_of(message);
      SomeRows rows = {};
      if constexpr (kKeepsRows) find_rows(to, 0, rows);
      Sums sums = {};
      const uint32_t steps = weight_of(to.unit).chunks;
      uint32_t previous = Form::kStages;  // in use until the next chunk's first products have begun
      for (uint32_t step = 0; step < steps; ++step) {
        if (step != 0) instruction::wait_for_phase(full(at.stage), at.parity());
        multiply(__shfl_sync(~0u, stage(at.stage), 0), a, sums, [&] {
          if (previous != Form::kStages) free_stage(previous);
        });
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
      finish(to, sums, rows);
      if (!to.unit.is_second) let_announce(turn++, to.unit.tile);
    }
  }

  __device__ __forceinline__ void run() const {
    start();
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
    if (warp >= Form::kConsumerWarps) {
      if constexpr (Form::kMovesRegisters) instruction::give_registers<56>();
      if (lane == 0 && warp == Form::kConsumerWarps) fetch();
      if (lane == 0 && warp == Form::kConsumerWarps + 1) announce();
      __syncwarp();
    } else {
      if constexpr (Form::kMovesRegisters) instruction::take_registers<224>();
      consume();
    }
  }
};

#endif
}  // namespace nibble::experts
