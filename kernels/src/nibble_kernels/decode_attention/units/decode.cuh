// Attention of a few query tokens a sequence over a paged cache of keys and values.
//
// Persistent thread blocks. One warp of a block copies the tiles of its units (work.cuh); the others share
// each unit: one takes every eighth tile, or fourth. They add their results from shared memory, a warp for
// each row. Where a sequence has several splits, these go to global memory, and the warp that brings the last
// one of a row adds them, the first one first.
#pragma once

#include "decode_attention/units/tile.cuh"
#include "decode_attention/units/work.cuh"

namespace nibble::attention::units {

template <class Form>
class Attention {
 public:
  __device__ __forceinline__ Attention(const Problem& p, const CUtensorMap& map, Shared<Form>& shared)
      : p_(p), map_(map), shared_(shared) {}

  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    if (threadIdx.x == Form::kConsumers) instruction::prefetch_map(map_);
    init_barriers();
    __syncthreads();
    instruction::wait_for_previous_kernel();
    if (warp() == Form::kWarps) {
      Copier<Form>(p_, map_, shared_).run();
    } else {
      compute();
    }
  }

 private:
  static constexpr uint32_t kDim = Form::kHeadDim, kQuads = kDim / 4;
  static constexpr uint32_t kQuadsOfLane = kQuads < kLanes ? 1 : kQuads / kLanes;

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }

  __device__ __forceinline__ void init_barriers() {
    static_assert(Form::kStages <= Form::kConsumers && Form::kUnits <= Form::kConsumers);
    const uint32_t i = threadIdx.x;
    if (i < Form::kStages) {
      instruction::init_barrier(instruction::shared_place(&shared_.full[i]), 1);
      instruction::init_barrier(instruction::shared_place(&shared_.empty[i]), Form::kHeads);
    }
    if (i < Form::kUnits) {
      instruction::init_barrier(instruction::shared_place(&shared_.known[i]), 1);
      instruction::init_barrier(instruction::shared_place(&shared_.forgotten[i]), Form::kWarps);
    }
    if (i == 0) instruction::init_barrier(instruction::shared_place(&shared_.added), Form::kWarps);
    instruction::publish_barriers();
  }

  // One arrival of the warp, after what its lanes did before.
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    __syncwarp();
    if (lane() == 0) instruction::arrive(instruction::shared_place(&barrier));
  }

  __device__ __forceinline__ void compute() {
    Place<Form::kUnits> place;
    Place<Form::kStages> unit_stage;
    uint32_t additions = 0;
#pragma unroll 1
    for (;; place.advance(1)) {
      instruction::wait_for_phase(instruction::shared_place(&shared_.known[place.number]), place.parity);
      const Unit& unit = shared_.units[place.number];
      if (unit.splits == 0) return;
      compute_unit(unit, unit_stage, additions);
      unit_stage.advance_far(unit.tiles);
      arrive(shared_.forgotten[place.number]);
    }
  }

  // --- a unit ---

  // Which of the unit's heads this warp has, and which of that head's warps it is.
  static __device__ __forceinline__ uint32_t head_of(uint32_t warp) { return warp % Form::kHeads; }
  static __device__ __forceinline__ uint32_t rank_of(uint32_t warp) { return warp / Form::kHeads; }

  __device__ __forceinline__ void compute_unit(const Unit& unit, Place<Form::kStages> stage,
                                               uint32_t& additions) {
    const uint32_t tiles = unit.tiles, begin = unit.begin;
    Query<Form> query;
    float factor[Form::kRowGroups][2];  // of a product: the scale, in base 2 unless scores are capped
    load_queries(unit, query, factor);
    const uint32_t seen_by_all = seen_first(unit, unit.queries == 0 ? 0 : unit.queries - 1);
    const uint32_t seen_end_by_all = seen_end(unit, 0);
    Partial<Form> partial;
    clear(partial);
    stage.advance(rank_of(warp()));
#pragma unroll 1
    for (uint32_t tile = rank_of(warp()); tile < tiles; tile += Form::kWarpsOfHead) {
      const uint32_t token = begin + tile * kTile;
      uint8_t* const memory =
          shared_.ring + stage.number * Form::kStageBytes + head_of(warp()) * Form::kTileBytes;
      instruction::wait_for_phase(instruction::shared_place(&shared_.full[stage.number]), stage.parity);
      if constexpr (Form::kComputes) {
        const bool is_edge = token < seen_by_all || token + kTile > seen_end_by_all;
        if (is_edge) clear_unseen(unit, token, memory);
        Scores<Form> scores;
        score<Form>(scores, memory, query);
        scale(scores, factor);
        if (is_edge) hide(unit, token, scores);
        weigh<Form>(scores, partial);
        add_values<Form>(partial, scores, memory);
        if (is_edge) instruction::publish_to_products();
      }
      arrive(shared_.empty[stage.number]);
      stage.advance(Form::kWarpsOfHead);
    }
    add_totals(partial);
    add_warps(unit, partial, additions);
  }

  __device__ __forceinline__ void scale(Scores<Form>& scores,
                                        const float (&factor)[Form::kRowGroups][2]) const {
    constexpr float kLog2E = 1.4426950408889634f;
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) scores.of[group][j] *= factor[group][j % 2];
    }
    if (p_.soft_cap == 0) return;
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        float& score = scores.of[group][j];
        score = tanhf(score / p_.soft_cap) * (p_.soft_cap * kLog2E);
      }
    }
  }

  // Tokens that no query sees may be anything, also NaN: they become zero.
  static __device__ __forceinline__ void clear_unseen(const Unit& unit, uint32_t begin, uint8_t* tile) {
#pragma unroll 1
    for (uint32_t i = lane(); i < Form::kTileBytes / 16; i += kLanes) {
      const uint32_t token = begin + i / 8 % kTile;
      if (token < unit.first || token >= unit.length)
        *reinterpret_cast<uint4*>(tile + i * 16) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void hide(const Unit& unit, uint32_t begin, Scores<Form>& scores) const {
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t query = query_of(unit, group * 8 + lane() % 4 * 2 + i);
        const uint32_t first = seen_first(unit, query), end = seen_end(unit, query);
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          const uint32_t token = begin + lane() / 4 + j * 8;
          if (token < first || token >= end) scores.of[group][j * 2 + i] = -INFINITY;
        }
      }
    }
  }

  static __device__ __forceinline__ void clear(Partial<Form>& partial) {
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t tile = 0; tile < Form::kDimTiles; ++tile) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) partial.sums[group][tile][i] = 0;
      }
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) partial.maximum[group][i] = -INFINITY, partial.total[group][i] = 0;
    }
  }

  static __device__ __forceinline__ void add_totals(Partial<Form>& partial) {
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
        for (uint32_t mask = 4; mask < kLanes; mask *= 2)
          partial.total[group][i] += shuffled(partial.total[group][i], mask);
      }
    }
  }

  // --- rows and queries ---

  __device__ __forceinline__ uint32_t rows_of(const Unit& unit) const {
    const uint32_t rows = p_.group * unit.queries, before = unit.row_tile * kRows;
    return rows > before ? min(rows - before, kRows) : 0;
  }
  // Which of the sequence's queries a row is of; the last one for what is not a row.
  __device__ __forceinline__ uint32_t query_of(const Unit& unit, uint32_t row) const {
    return p_.most_queries == 1 ? 0 : min((unit.row_tile * kRows + row) / p_.group, unit.queries - 1);
  }
  __device__ __forceinline__ uint32_t seen_end(const Unit& unit, uint32_t query) const {
    const uint32_t end = unit.length + query + 1;
    return end > unit.queries ? min(end - unit.queries, unit.length) : 0;
  }
  __device__ __forceinline__ uint32_t seen_first(const Unit& unit, uint32_t query) const {
    const uint32_t end = seen_end(unit, query);
    return p_.window != 0 && end > p_.window ? end - p_.window : 0;
  }

  // Where a row's query, and its result without strides, lies.
  struct RowPlace {
    uint32_t token, head;
  };
  __device__ __forceinline__ RowPlace place_of(const Unit& unit, uint32_t head, uint32_t row) const {
    if (p_.most_queries == 1) return {unit.query_begin, (unit.head + head) * p_.group + row};
    const uint32_t all = unit.row_tile * kRows + row, query = all / p_.group;
    return {unit.query_begin + query, (unit.head + head) * p_.group + all - query * p_.group};
  }

  __device__ __forceinline__ void load_queries(const Unit& unit, Query<Form>& query,
                                               float (&factor)[Form::kRowGroups][2]) const {
    constexpr float kLog2E = 1.4426950408889634f;
    const float scale = p_.scale * (p_.soft_cap != 0 ? 1 : kLog2E) * (p_.k_scale ? __ldg(p_.k_scale) : 1);
    const uint32_t rows = rows_of(unit);
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      load_query(unit, rows, group, query[group]);
      const float own = Form::kIsFp8 ? fit_range(query[group]) : 1;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t column = lane() % 4 * 2 + i;
        factor[group][i] = scale * __uint_as_float(__shfl_sync(~0u, __float_as_uint(own), column * 4));
      }
    }
  }

  // Zeros where there is no such row.
  __device__ __forceinline__ void load_query(const Unit& unit, uint32_t rows, uint32_t group,
                                             uint2 (&query)[Form::kSteps]) const {
    const uint32_t row = group * 8 + lane() / 4;
    const bool is_there = row < rows;
    const RowPlace place = place_of(unit, head_of(warp()), is_there ? row : 0);
    const uint16_t* const from = static_cast<const uint16_t*>(p_.query) +
                                 place.token * p_.query_token_stride + place.head * p_.query_head_stride;
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step) {
      query[step] = uint2{0, 0};
      if (is_there)
        query[step] = __ldg(reinterpret_cast<const uint2*>(from + element_of<Form>(step, lane() % 4)));
    }
  }

  // For FP8 queries become float16 after a power of two that fits each row; what this rounds off is below
  // 2^-25 of the row's largest element. The result takes that back.
  static __device__ __forceinline__ float fit_range(uint2 (&query)[Form::kSteps]) {
    uint32_t largest = 0;  // bits of the largest magnitude
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step) {
      const uint32_t x = query[step].x, y = query[step].y;
      largest = max(largest, max(max(x & 0x7fff, x >> 16 & 0x7fff), max(y & 0x7fff, y >> 16 & 0x7fff)));
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    // 2^-e for a row whose largest element is in [2^e, 2^(e + 1)).
    const uint32_t exponent = max(min(largest >> 7, 252u), 2u);
    const float factor = __uint_as_float((254 - exponent) << 23);
    const auto fit = [&](uint32_t bits) {
      return pair_of(__uint_as_float(bits << 16) * factor, __uint_as_float(bits & 0xffff0000) * factor, true);
    };
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step) {
      query[step].x = fit(query[step].x);
      query[step].y = fit(query[step].y);
    }
    return __uint_as_float(exponent << 23);
  }

  // --- the sum of a block's warps ---

  // f(row of the group, number of four elements, those elements of the row) for what this lane has.
  template <class F>
  static __device__ __forceinline__ void for_quads(const Partial<Form>& partial, uint32_t group, F&& f) {
    const uint32_t r = lane() / 4, c = lane() % 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (uint32_t load = 0; load < Form::kLoads; ++load) {
#pragma unroll
        for (uint32_t quad = 0; quad < Form::kPerLoad / 4; ++quad) {
          const uint32_t tile = load * (Form::kPerLoad / 2) + quad * 2;
          const float (&low)[4] = partial.sums[group][tile], (&high)[4] = partial.sums[group][tile + 1];
          f(2 * c + i, (load * 8 + r) * (Form::kPerLoad / 4) + quad,
            make_float4(low[i], low[2 + i], high[i], high[2 + i]));
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t quad_place(uint32_t row, uint32_t quad) {
    return row * kQuads + (quad ^ (row >> 1 & 3));  // apart, so that fewer lanes meet in a bank
  }
  __device__ __forceinline__ float4* sums_of(uint32_t warp) const {
    return reinterpret_cast<float4*>(shared_.sums) + warp * (8 * kQuads);
  }

  __device__ __forceinline__ void add_warps(const Unit& unit, const Partial<Form>& partial,
                                            uint32_t& additions) {
    const uint32_t rows = rows_of(unit), summands = min(unit.tiles, Form::kWarpsOfHead);
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      // The first time the barrier's phase before the first one is over.
      instruction::wait_for_phase(instruction::shared_place(&shared_.added), ~additions & 1);
      const uint32_t rows_here = rows > group * 8 ? min(rows - group * 8, 8u) : 0;
      if (rank_of(warp()) < summands) {
        float4* const quads = sums_of(warp());
        for_quads(partial, group, [&](uint32_t row, uint32_t quad, const float4& sums) {
          if (row < rows_here) quads[quad_place(row, quad)] = sums;
        });
        if (lane() < 4) {
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) {
            shared_.maxima[warp()][lane() * 2 + i] = partial.maximum[group][i];
            shared_.totals[warp()][lane() * 2 + i] = partial.total[group][i];
          }
        }
      }
      instruction::meet_threads<Form::kConsumers>();
      for (uint32_t i = warp(); i < rows_here * Form::kHeads; i += Form::kWarps)
        add_row(unit, i % Form::kHeads, group, i / Form::kHeads, summands);
      arrive(shared_.added);
      ++additions;
    }
  }

  // A row of a head, from what that head's warps have of it.
  __device__ __forceinline__ void add_row(const Unit& unit, uint32_t head, uint32_t group, uint32_t row,
                                          uint32_t summands) const {
    float maximum = -INFINITY, total = 0;
    for (uint32_t i = 0; i < summands; ++i)
      maximum = fmaxf(maximum, shared_.maxima[i * Form::kHeads + head][row]);
    const float base = maximum == -INFINITY ? 0 : maximum;
    float4 sums[kQuadsOfLane];
#pragma unroll
    for (uint32_t i = 0; i < kQuadsOfLane; ++i) sums[i] = make_float4(0, 0, 0, 0);
    for (uint32_t i = 0; i < summands; ++i) {
      const uint32_t from = i * Form::kHeads + head;
      const float weight = instruction::power_of_two(shared_.maxima[from][row] - base);
      total = fmaf(shared_.totals[from][row], weight, total);
#pragma unroll
      for (uint32_t j = 0; j < kQuadsOfLane; ++j) {
        if (has_quad(j)) add_part(sums[j], sums_of(from)[quad_place(row, quad_of(j))], weight);
      }
    }
    const uint32_t in_tile = group * 8 + row;
    if (unit.splits == 1) {
      write_row(place_of(unit, head, in_tile), maximum, total, sums);
    } else {
      write_partial(unit, head, in_tile, maximum, total, sums);
    }
  }

  static __device__ __forceinline__ uint32_t quad_of(uint32_t i) { return i * kLanes + lane(); }
  static __device__ __forceinline__ bool has_quad(uint32_t i) {
    return kQuads % kLanes == 0 || quad_of(i) < kQuads;
  }
  static __device__ __forceinline__ void add_part(float4& sum, const float4& part, float weight) {
    sum.x = fmaf(part.x, weight, sum.x), sum.y = fmaf(part.y, weight, sum.y);
    sum.z = fmaf(part.z, weight, sum.z), sum.w = fmaf(part.w, weight, sum.w);
  }

  __device__ __forceinline__ void write_row(const RowPlace& place, float maximum, float total,
                                            const float4 (&sums)[kQuadsOfLane]) const {
    const float factor = finish_row(place, maximum, total);
    uint2* const out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + row_of(place) * kDim);
#pragma unroll
    for (uint32_t i = 0; i < kQuadsOfLane; ++i) {
      if (has_quad(i))
        out[quad_of(i)] = uint2{pair_of(sums[i].x * factor, sums[i].y * factor, false),
                                pair_of(sums[i].z * factor, sums[i].w * factor, false)};
    }
  }

  __device__ __forceinline__ size_t row_of(const RowPlace& place) const {
    return size_t{place.token} * (p_.kv_heads * p_.group) + place.head;
  }

  // What a row's sum of values is multiplied by. One lane also writes the log-sum-exp.
  __device__ __forceinline__ float finish_row(const RowPlace& place, float maximum, float total) const {
    constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
    float factor = p_.v_scale ? __ldg(p_.v_scale) : 1;
    if (p_.sinks != nullptr) {
      const float sink = __ldg(p_.sinks + place.head) * kLog2E, top = fmaxf(maximum, sink);
      const float of_keys = instruction::power_of_two(maximum - top);
      total = fmaf(total, of_keys, instruction::power_of_two(sink - top));
      factor *= of_keys;
      maximum = top;
    }
    if (lane() == 0 && p_.lse != nullptr)
      p_.lse[row_of(place)] = total > 0 ? (maximum + log2f(total)) * kLn2 : -INFINITY;
    return total == 0 ? 0 : factor / total;
  }

  // --- partial results in global memory ---

  __device__ __forceinline__ float* slot_of(const Unit& unit, uint32_t head, uint32_t split) const {
    const size_t number = unit.slot + head + size_t{split} * unit.next_slot;
    return p_.partials + number * partial_floats(p_, kDim);
  }

  // A row of this split. The warp that brings the last split of a row adds them.
  __device__ __forceinline__ void write_partial(const Unit& unit, uint32_t head, uint32_t row, float maximum,
                                                float total, const float4 (&sums)[kQuadsOfLane]) const {
    const uint32_t rows = slot_rows(p_);
    float* const slot = slot_of(unit, head, unit.split);
#pragma unroll
    for (uint32_t i = 0; i < kQuadsOfLane; ++i) {
      if (has_quad(i)) reinterpret_cast<float4*>(slot)[row * kQuads + quad_of(i)] = sums[i];
    }
    if (lane() == 0) slot[rows * kDim + row] = maximum, slot[rows * kDim + rows + row] = total;
    __threadfence();
    __syncwarp();
    uint32_t is_last = 0;
    if (lane() == 0) {
      const uint32_t pair =
          (unit.sequence * p_.kv_heads + unit.head + head) * row_tiles_of(p_) + unit.row_tile;
      uint32_t* const counter = p_.counters + pair * kRows + row;
      is_last = atomicAdd(counter, 1) + 1 == unit.splits;
      if (is_last) *counter = 0;
    }
    if (__shfl_sync(~0u, is_last, 0) == 0) return;
    __threadfence();
    add_splits(unit, head, row);
  }

  __device__ __forceinline__ void add_splits(const Unit& unit, uint32_t head, uint32_t row) const {
    const uint32_t splits = unit.splits, rows = slot_rows(p_);
    const size_t stride = size_t{unit.next_slot} * partial_floats(p_, kDim);
    const float* const slots = slot_of(unit, head, 0);
    constexpr uint32_t kEach = kMostSplits / kLanes;
    float weights[kEach], totals[kEach], maximum = -INFINITY, total = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t split = i * kLanes + lane();
      const float* const stats = slots + split * stride + rows * kDim + row;
      weights[i] = split < splits ? __ldcg(stats) : -INFINITY;
      totals[i] = split < splits ? __ldcg(stats + rows) : 0;
      maximum = fmaxf(maximum, weights[i]);
    }
#pragma unroll
    for (uint32_t mask = 1; mask < kLanes; mask *= 2) maximum = fmaxf(maximum, shuffled(maximum, mask));
    const float base = maximum == -INFINITY ? 0 : maximum;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      weights[i] = instruction::power_of_two(weights[i] - base);
      total = fmaf(totals[i], weights[i], total);
    }
#pragma unroll
    for (uint32_t mask = 1; mask < kLanes; mask *= 2) total += shuffled(total, mask);
    float4 sums[kQuadsOfLane];
#pragma unroll
    for (uint32_t i = 0; i < kQuadsOfLane; ++i) sums[i] = make_float4(0, 0, 0, 0);
    const float4* const parts = reinterpret_cast<const float4*>(slots) + row * kQuads;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (i * kLanes < splits) add_some(parts, stride / 4, i * kLanes, splits, weights[i], sums);
    }
    write_row(place_of(unit, head, row), maximum, total, sums);
  }

  // Up to 32 splits from `begin` on; each lane has the weight of one.
  __device__ __forceinline__ void add_some(const float4* parts, size_t stride, uint32_t begin,
                                           uint32_t splits, float weights,
                                           float4 (&sums)[kQuadsOfLane]) const {
    constexpr uint32_t kAtOnce = 8 / kQuadsOfLane;
#pragma unroll 1
    for (uint32_t in = 0; in < kLanes && begin + in < splits; in += kAtOnce) {
      float4 some[kAtOnce][kQuadsOfLane];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (uint32_t i = 0; i < kQuadsOfLane; ++i) {
          const uint32_t split = begin + in + j;
          const bool is_there = split < splits && has_quad(i);
          some[j][i] = is_there ? __ldcg(parts + split * stride + quad_of(i)) : make_float4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const float weight = __uint_as_float(__shfl_sync(~0u, __float_as_uint(weights), in + j));
#pragma unroll
        for (uint32_t i = 0; i < kQuadsOfLane; ++i) add_part(sums[i], some[j][i], weight);
      }
    }
  }

  const Problem& p_;
  const CUtensorMap& map_;
  Shared<Form>& shared_;
};

}  // namespace nibble::attention::units
