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

// Tiles in memory, with x and the intermediate in the order of products: route.cuh.
struct RoutedInMemory {};

template <class T, class Operand, class Form, class Routes = RoutedInMemory>
struct Multiplier {
  using Sums = float[Form::kStrips][Form::kSums];
  using Operands = warpgroup::Operands;

  const Problem& p;
  const SharedPlace shared;  // [stages]: codes [groups], scales [groups], x; then units, barriers, slots
  const Routes routes = {};
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

  __device__ __forceinline__ SharedPlace joined(uint32_t i) const { return slot_place(kSlots) + i * 8; }
  __device__ __forceinline__ SharedPlace taken(uint32_t i) const { return joined(2 + i); }
  __device__ __forceinline__ SharedPlace join_place(uint32_t i) const {
    return joined(4) + (i * Form::kGroups + warp % Form::kGroups) * (kLanes * 16) + lane * 16;
  }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      if constexpr (Form::kParts > 1) {
        for (uint32_t i = 0; i < 2; ++i) {
          instruction::init_barrier(joined(i), Form::kGroups);
          instruction::init_barrier(taken(i), Form::kGroups);
        }
      }
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

  // A stage, and the parity of the phase in which it is filled.
  struct Place {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
      if (++stage == Form::kStages) stage = 0, parity ^= 1;
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
  // Of the routed experts; the shared one's is as large.
  __device__ __forceinline__ const Weight& weight_of(const Unit& unit) const {
    return unit.is_second ? p.second : p.first;
  }
  // Where an expert's own weight is, and its number there.
  struct Source {
    const Weight& weight;
    uint32_t expert;
  };
  __device__ __forceinline__ Source source_of(const Unit& unit, uint32_t expert) const {
    if (expert < p.routed) return {weight_of(unit), expert};
    return {unit.is_second ? p.shared_second : p.shared_first, 0};
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
                                               const uint4& message, uint32_t at, uint32_t x_bytes) const {
    instruction::store_shared(unit_place(at), message);
    instruction::arrive_expecting(full(at), Form::kWeightBytes + x_bytes);
    instruction::copy_box(stage(at), weight.codes, 0, step * Form::kStageChunks, row, full(at));
    instruction::copy_box(stage(at) + Form::kGroups * Form::kStageChunks * kCodeBytes, weight.scales, 0,
                          step * Form::kStageChunks, row, full(at));
  }
  __device__ __forceinline__ void fetch_x(const uint4* x, uint32_t step, uint32_t at) const {
    instruction::copy_bulk(stage(at) + Form::kWeightBytes, x + size_t{step} * (Form::kXBytes / 16),
                           Form::kXBytes, full(at));
  }
  __device__ __forceinline__ void wait_for_stage(const Place& at) const {
    instruction::wait_for_phase(empty(at.stage), at.parity ^ 1);
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
    const Source source = source_of(unit, tile.expert);
    const Weight& weight = source.weight;
    const uint4 message = message_of(unit, tile);
    const uint32_t row = source.expert * weight_of(unit).groups + unit.row_block * Form::kGroups;
    const uint32_t steps = weight_of(unit).chunks;
    const uint4* const x = (unit.is_second ? reinterpret_cast<const uint4*>(p.inner) : p.x) +
                           size_t{unit.tile} * steps * (Form::kXBytes / 16);
    uint32_t step = 0;
    if (unit.is_second) {
      if (!instruction::has_reached(p.complete + unit.tile, p.first.row_blocks)) {
        Place ahead = at;  // weights depend on nobody
        for (; step < steps && step < Form::kStages; ++step, ahead.advance()) {
          wait_for_stage(ahead);
          fetch_weight(weight, step, row, message, ahead.stage, Form::kXBytes);
        }
        instruction::wait_until_reached(p.complete + unit.tile, p.first.row_blocks);
      }
      instruction::publish_to_copies();
      for (uint32_t i = 0; i < step; ++i, at.advance()) fetch_x(x, i, at.stage);
    }
    for (; step < steps; ++step, at.advance()) {
      wait_for_stage(at);
      fetch_weight(weight, step, row, message, at.stage, Form::kXBytes);
      fetch_x(x, step, at.stage);
    }
  }

  // By a warp: the same, with a block's own table of tiles and with x in its rows. Tiles beyond the last unit
  // are asked for by nobody, so that as many are taken as there are: the last one clears the queue.
  __device__ __forceinline__ void fetch_rows() const {
    const uint32_t tiles = routes.table.tiles, units = tiles * (p.first.row_blocks + p.second.row_blocks);
    uint32_t number = blockIdx.x, next = gridDim.x + blockIdx.x;
    Place at;
    while (number < units) {
      const uint32_t taken = lane == 0 ? atomicAdd(p.queue, 1u) : 0;
      fetch_unit_rows(unit_of(number, tiles), at);
      number = next;
      if (lane == 0 && taken == units - 1) *p.queue = 0;
      next = 2 * gridDim.x + __shfl_sync(~0u, taken, 0);
    }
    wait_for_stage(at);
    if (lane != 0) return;
    instruction::store_shared(unit_place(at.stage), make_uint4(kNoUnit, 0, 0, 0));
    instruction::arrive(full(at.stage));
  }

  __device__ __forceinline__ void fetch_unit_rows(const Unit& unit, Place& at) const {
    const Tile tile = routes.table.tile(unit.tile);
    const Source source = source_of(unit, tile.expert);
    const uint4 message = message_of(unit, tile);
    const uint32_t row = source.expert * weight_of(unit).groups + unit.row_block * Form::kGroups;
    const uint32_t steps = quotient_up(weight_of(unit).chunks, Form::kStageChunks),
                   columns = routes.columns_of(unit.is_second),
                   place = tile.first + min(lane, tile.count - 1);
    const size_t from = unit.is_second ? place : routes.table.order[place] / routes.pairs_of_token;
    const uint4* const x =
        (unit.is_second ? reinterpret_cast<const uint4*>(p.inner) : routes.x) + from * (columns / 8);
    const auto bytes = [&](uint32_t step) {
      return min(columns - step * Form::kStageColumns, Form::kStageColumns) * 2;
    };
    const auto weights = [&](uint32_t step, uint32_t to) {
      if (lane == 0) fetch_weight(source.weight, step, row, message, to, tile.count * bytes(step));
    };
    const auto rows = [&](uint32_t step, uint32_t to) {
      if (lane < tile.count) {
        instruction::copy_bulk(stage(to) + Form::kWeightBytes + lane * Form::kRowBytes,
                               x + step * (Form::kStageColumns / 8), bytes(step), full(to));
      }
    };
    uint32_t step = 0;
    if (unit.is_second) {
      // Weights depend on nobody.
      uint32_t* const complete = p.complete + unit.tile;
      Place ahead = at;
#pragma unroll 1
      for (; step < steps && step < Form::kStages; ++step, ahead.advance()) {
        wait_for_stage(ahead);
        weights(step, ahead.stage);
      }
      instruction::wait_until_reached(complete, p.first.row_blocks);
      instruction::publish_to_copies();
      __syncwarp();
#pragma unroll 1
      for (uint32_t i = 0; i < step; ++i, at.advance()) rows(i, at.stage);
      // The last unit that waited clears the counter.
      if (lane == 0 && atomicAdd(complete, 1u) + 1 == p.first.row_blocks + p.second.row_blocks) *complete = 0;
    }
#pragma unroll 1
    for (; step < steps; ++step, at.advance()) {
      wait_for_stage(at);
      weights(step, at.stage);
      rows(step, at.stage);
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

  // Where a warp's first tile of a stage lies, and a lane's part of it and of x. In rows, the third and the
  // fourth quarter have their pieces in another order, so that the lanes of two tokens read different banks.
  struct Lane {
    uint32_t codes, scales, x, other_x, order;  // other_x: of the third and fourth piece
    bool swaps;
  };
  __device__ __forceinline__ Lane lane_of_stage() const {
    const uint32_t part = warp / Form::kGroups, tile = warp % Form::kGroups * Form::kStageChunks + part;
    const bool swaps = Form::kGathers && lane % 4 >= 2;
    const uint32_t in_rows =
        part * (kChunk * 2) + lane / 4 * Form::kRowBytes + lane % 4 * 64 + (swaps ? 32 : 0);
    const uint32_t x = Form::kWeightBytes + (Form::kGathers ? in_rows : lane * 16);
    return {tile * kCodeBytes + lane * 16 + (swaps ? 8 : 0),
            Form::kGroups * Form::kStageChunks * kCodeBytes + tile * kScaleBytes + lane * 4,
            x,
            swaps ? x - 32 : x + 32,
            swaps ? 0x2301u : 0x3210u,
            swaps};
  }
  __device__ __forceinline__ Fragment tile_of_stage(SharedPlace own, const Lane& at, uint32_t chunk) const {
    const SharedPlace codes = own + at.codes + chunk * kCodeBytes;
    const uint32_t scales = instruction::load_shared_word(own + at.scales + chunk * kScaleBytes);
    if constexpr (!Form::kGathers)
      return {instruction::load_shared(codes), instruction::load_shared(codes + kCodeBytes / 2), scales};
    const SharedPlace other = own + (at.codes ^ 8) + chunk * kCodeBytes;
    const uint2 first = instruction::load_shared_pair(codes), second = instruction::load_shared_pair(other),
                third = instruction::load_shared_pair(codes + kCodeBytes / 2),
                fourth = instruction::load_shared_pair(other + kCodeBytes / 2);
    return {make_uint4(first.x, first.y, second.x, second.y),
            make_uint4(third.x, third.y, fourth.x, fourth.y), __byte_perm(scales, 0, at.order)};
  }

  // A chunk of a warp's group. Fills: rows end before the chunk does, after `columns`. Two chains of sums
  // wait for each other half as long as one.
  template <bool Fills>
  __device__ __forceinline__ void multiply_warp(SharedPlace own, const Lane& at, uint32_t chunk, Sums& sums,
                                                Sums& others, uint32_t columns) const {
    constexpr uint32_t kGroupBytes = Form::kGathers ? kTokenGroup * Form::kRowBytes : kTokenGroup * 64,
                       kChunkBytes = Form::kGathers ? kChunk * 2 : Form::kXChunkBytes;
    const Fragment tile = tile_of_stage(own, at, chunk);
    const SharedPlace first = own + at.x + chunk * kChunkBytes,
                      second = own + at.other_x + chunk * kChunkBytes;
    uint4 b[kPieces][Form::kTokenGroups];
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      // Pieces of the other half lie 32 bytes on, or back.
      const SharedPlace x = Form::kGathers ? (piece < 2 ? first + piece * 16 : second + (piece - 2) * 16)
                                           : first + piece * (Form::kTokens * 64);
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
        b[piece][i] = instruction::load_shared(x + i * kGroupBytes);
        if (Fills && lane % 4 * 32 + (piece ^ (at.swaps ? 2 : 0)) * 8 >= columns)
          b[piece][i] = make_uint4(0, 0, 0, 0);
      }
    }
    uint32_t scales[4];
    Operand::scales(tile.scales, scales);
    float(&all)[Form::kTokenGroups][4] = reinterpret_cast<float(&)[Form::kTokenGroups][4]>(sums);
    float(&rest)[Form::kTokenGroups][4] =
        reinterpret_cast<float(&)[Form::kTokenGroups][4]>(Form::kTokenGroups == 1 ? others : sums);
#pragma unroll
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
      uint32_t a[2][4];
      warpgroup::decode_piece<Operand>(word(tile.upper, piece), word(tile.lower, piece), scales[piece / 2],
                                       scales[2 + piece / 2], a);
#pragma unroll
      for (uint32_t i = 0; i < Form::kTokenGroups; ++i) {
        Operand::mma(all[i], a[0][0], a[0][1], a[0][2], a[0][3], b[piece][i].x, b[piece][i].y);
        Operand::mma(rest[i], a[1][0], a[1][1], a[1][2], a[1][3], b[piece][i].z, b[piece][i].w);
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
    if constexpr (Form::kGathers) {
      const auto& table = routes.table;
      return {table.order[place(lane / 4)], table.weights[place(lane % 4 * 2)],
              table.weights[place(lane % 4 * 2 + 1)]};
    }
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
    const Source source = source_of(unit, tile.expert);
    const float2 scale = __ldg(source.weight.global_scales + source.expert);
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
        if constexpr (Form::kGathers)
          return p.inner + (size_t{to.tile.first + token} * routes.inner_columns + column) / 2;
        const size_t chunk = size_t{to.unit.tile} * p.second.chunks + column / kChunk;
        return p.inner + chunk * (Form::kXChunkBytes / 4) + Form::word_of(token, column);
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
    const uint32_t own =
        Form::kWarpgroup ? warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps : warp % Form::kGroups;
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
    const uint32_t group = warp / kWarps * (kWarps * Form::kStrips) + warp % kWarps;
    warpgroup::multiply_chunk<Operand, Form::kTokens, Form::kStrips>(
        own + group * kCodeBytes, own + Form::kGroups * kCodeBytes + group * kScaleBytes,
        own + Form::kWeightBytes, a, sums, after_previous);
  }

  // In another block of instructions than the products of this stage: see instruction::arrive.
  __device__ __forceinline__ void free_stage(uint32_t i) const {
    if (lane == 0) instruction::arrive(empty(i));
  }

  // Adds the second part's sums to the first's. Whether this warp has the whole.
  __device__ __forceinline__ bool join(Sums& sums, uint32_t unit) const {
    if constexpr (Form::kParts > 1) {
      const uint32_t i = unit % 2, parity = unit / 2 % 2;
      if (warp >= Form::kGroups) {
        instruction::wait_for_phase(taken(i), parity ^ 1);
        const auto word_of_sum = [&](uint32_t k) { return __float_as_uint(sums[0][k]); };
        instruction::store_shared(join_place(i),
                                  make_uint4(word_of_sum(0), word_of_sum(1), word_of_sum(2), word_of_sum(3)));
        __syncwarp();
        if (lane == 0) instruction::arrive(joined(i));
        return false;
      }
      instruction::wait_for_phase(joined(i), parity);
      const float4 others = instruction::load_shared_floats(join_place(i));
      __syncwarp();
      if (lane == 0) instruction::arrive(taken(i));
      sums[0][0] += others.x, sums[0][1] += others.y, sums[0][2] += others.z, sums[0][3] += others.w;
    }
    return true;
  }

  // Of a stage, by a warp: all of its chunks, or those that are there.
  __device__ __forceinline__ void multiply_stage(SharedPlace own, const Lane& at, Sums& sums, Sums& others,
                                                 uint32_t columns) const {
    if (!Form::kGathers || columns >= kChunk * Form::kChunks) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kChunks; ++i) multiply_warp<false>(own, at, i, sums, others, kChunk);
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < Form::kChunks; ++i) {
      if (columns > i * kChunk) multiply_warp<true>(own, at, i, sums, others, columns - i * kChunk);
    }
  }
  // Columns that a warp has from the first stage on, where a stage may be filled in part.
  __device__ __forceinline__ uint32_t columns_of(const Unit& unit) const {
    if constexpr (Form::kGathers) {
      const uint32_t all = routes.columns_of(unit.is_second), skipped = warp / Form::kGroups * kChunk;
      return all > skipped ? all - skipped : 0;
    }
    return 0;
  }

  __device__ __forceinline__ void consume() const {
    Operands a = {};
    Place at;
    const Lane own = lane_of_stage();
    for (uint32_t turn = 0, unit = 0;;) {
      instruction::wait_for_phase(full(at.stage), at.parity);
      const uint4 message = instruction::load_shared(unit_place(at.stage));
      if (message.x == kNoUnit) return let_announce(turn, kNoUnit);
      Target to = target_of(message);
      SomeRows rows = {};
      if constexpr (kKeepsRows) find_rows(to, 0, rows);
      Sums sums = {};
      const uint32_t steps = quotient_up(weight_of(to.unit).chunks, Form::kStageChunks);
      if constexpr (Form::kWarpgroup) {
        uint32_t previous = Form::kStages;  // in use until the next chunk's first products have begun
        for (uint32_t step = 0; step < steps; ++step) {
          if (step != 0) instruction::wait_for_phase(full(at.stage), at.parity);
          multiply(__shfl_sync(~0u, stage(at.stage), 0), a, sums, [&] {
            if (previous != Form::kStages) free_stage(previous);
          });
          previous = at.stage;
          at.advance();
        }
        instruction::wait_for_products<0>();
        free_stage(previous);
      } else {
        Sums others = {};
        uint32_t columns = columns_of(to.unit), previous = at.stage;
        for (uint32_t step = 0; step < steps; ++step) {
          if (step != 0) {
            free_stage(previous);
            instruction::wait_for_phase(full(at.stage), at.parity);
          }
          multiply_stage(stage(at.stage), own, sums, others, columns);
          columns = columns > Form::kStageColumns ? columns - Form::kStageColumns : 0;
          __syncwarp();
          previous = at.stage;
          at.advance();
        }
        free_stage(previous);
        if constexpr (Form::kTokenGroups == 1) {
#pragma unroll
          for (uint32_t i = 0; i < Form::kSums; ++i) sums[0][i] += others[0][i];
        }
      }
      if (join(sums, unit++)) finish(to, sums, rows);
      if (!to.unit.is_second) let_announce(turn++, to.unit.tile);
    }
  }

  __device__ __forceinline__ void run() const {
    if (warp >= Form::kConsumerWarps) {
      if constexpr (Form::kMovesRegisters) instruction::give_registers<56>();
      if (warp == Form::kConsumerWarps) {
        if constexpr (Form::kGathers) {
          fetch_rows();
        } else if (lane == 0) {
          fetch();
        }
      }
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
