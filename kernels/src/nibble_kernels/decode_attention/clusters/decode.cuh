// Attention of a few query tokens a sequence over a paged cache of keys and values.
//
// Persistent clusters of thread blocks. One warp of a block copies the block's tiles of a unit (work.cuh), four
// multiply, and others add: each of the cluster's multiplying warps sends what it has of a unit's result to
// the blocks, a slice of each row to each of them, and there a warp adds a row's slices. Where a sequence has
// several splits, their results go to global memory, and the warp that brings the last ones of its rows adds
// them. All sums are in a fixed order.
#pragma once

#include "decode_attention/clusters/tile.cuh"
#include "decode_attention/clusters/work.cuh"

namespace nibble::attention::clusters {

template <class Form>
class Attention {
 public:
  __device__ __forceinline__ Attention(const Problem& p, const CUtensorMap& map, Shared<Form>& shared)
      : p_(p),
        map_(map),
        shared_(shared),
        rank_(instruction::cluster_rank()),
        buffers_(min(Form::kReceivedBytes / 16 / Form::received_quads(slot_rows(p)), Form::kMostBuffers)) {}

  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    if (threadIdx.x == 0) instruction::prefetch_map(map_);
    init_barriers();
    __syncthreads();
    // The barriers of all blocks are ready after the second step.
    instruction::begin_cluster_barrier_with_barriers();
    if (warp() == Form::kWarps) {
      Copier<Form>(p_, map_, shared_).run();
      instruction::end_cluster_barrier();
    } else {
      instruction::end_cluster_barrier();
      instruction::wait_for_previous_kernel();
      if (warp() < Form::kWarps) {
        multiply();
      } else {
        add(warp() - Form::kWarps - 1);
      }
    }
  }

 private:
  static constexpr uint32_t kDim = Form::kHeadDim, kSliceQuads = Form::kSliceQuads;

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }

  __device__ __forceinline__ void init_barriers() {
    static_assert(Form::kStages <= Form::kThreads && Form::kUnits <= Form::kThreads);
    const uint32_t i = threadIdx.x;
    if (i < Form::kStages) {
      instruction::init_barrier(instruction::shared_place(&shared_.full[i]), 1);
      instruction::init_barrier(instruction::shared_place(&shared_.empty[i]), 1);
    }
    if (i < Form::kUnits) {
      instruction::init_barrier(instruction::shared_place(&shared_.known[i]), 1);
      instruction::init_barrier(instruction::shared_place(&shared_.forgotten[i]),
                                Form::kWarps + Form::kAdders);
    }
    if (i < Form::kMostBuffers) {
      instruction::init_barrier(instruction::shared_place(&shared_.got[i]), 1 + Form::kWarps);
      instruction::init_barrier(instruction::shared_place(&shared_.free[i]), Form::kRanks * Form::kAdders);
    }
    instruction::publish_barriers();
  }

  // One arrival of the warp, after what its lanes did before.
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    __syncwarp();
    if (lane() == 0) instruction::arrive(instruction::shared_place(&barrier));
  }

  // f(unit, place of its buffer) for each of the cluster's units. Returns the next place.
  template <class F>
  __device__ __forceinline__ Place for_units(F&& f) {
    Place place, buffer;
#pragma unroll 1
    for (;;) {
      wait_for(shared_.known[place.number], place.parity);
      const Unit& unit = shared_.units[place.number];
      if (unit.splits == 0) return buffer;
      f(unit, buffer);
      buffer.advance(1, buffers_);
      arrive(shared_.forgotten[place.number]);
      place.advance(1, Form::kUnits);
    }
  }

  // How many warps have tiles of a unit.
  static __device__ __forceinline__ uint32_t slots_of(const Unit& unit) {
    return min(unit.tiles, Form::kSlots);
  }

  // --- products ---

  __device__ __forceinline__ void multiply() {
    Place stage{warp(), 0};
    Place last = for_units([&](const Unit& unit, const Place& buffer) {
      const uint32_t slot = (warp() * Form::kRanks + rank_ - unit.first_warp) % Form::kSlots;
      const bool has_tiles = slot < slots_of(unit);
      Partial<Form> partial;
      if (has_tiles) compute(unit, slot, stage, partial);
      // Also without tiles: who misses a phase could take one for another.
      wait_for_cluster(shared_.free[buffer.number], buffer.parity ^ 1);
      arrive(shared_.got[buffer.number]);
      if (has_tiles) send(unit, slot, buffer.number, partial);
    });
    // Until no other block arrives here any more.
    for (uint32_t i = 0; i < buffers_; ++i) {
      wait_for(shared_.free[last.number], last.parity ^ 1);
      last.advance(1, buffers_);
    }
  }

  __device__ __forceinline__ void compute(const Unit& unit, uint32_t slot, Place& stage,
                                          Partial<Form>& partial) {
    const uint32_t tiles = unit.tiles, begin = unit.begin;
    Query<Form> query;
    float factor[Form::kRowGroups][2];  // of a product: the scale, in base 2 unless scores are capped
    load_queries(unit, query, factor);
    const uint32_t seen_by_all = seen_first(p_, unit, unit.queries == 0 ? 0 : unit.queries - 1);
    const uint32_t seen_end_by_all = seen_end(unit, 0);
    clear(partial);
#pragma unroll 1
    for (uint32_t tile = slot; tile < tiles; tile += Form::kSlots) {
      const uint32_t token = begin + tile * kTile;
      uint8_t* const memory = shared_.ring + stage.number * Form::kTileBytes;
      const bool is_edge = token < seen_by_all || token + kTile > seen_end_by_all;
      wait_for(shared_.full[stage.number], stage.parity);
      if (is_edge) clear_unseen(unit, token, memory);
      Scores<Form> scores;
      score<Form>(scores, memory, query);
      scale(scores, factor);
      if (is_edge) hide(unit, token, scores);
      weigh<Form>(scores, partial);
      add_values<Form>(partial, scores, memory);
      if (is_edge) instruction::publish_to_products();
      arrive(shared_.empty[stage.number]);
      stage.advance(Form::kWarps, Form::kStages);
    }
    add_totals(partial);
  }

  __device__ __forceinline__ void scale(Scores<Form>& scores,
                                        const float (&factor)[Form::kRowGroups][2]) const {
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
        const uint32_t query = query_of(p_, unit, group * 8 + lane() % 4 * 2 + i);
        const uint32_t first = seen_first(p_, unit, query), end = seen_end(unit, query);
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

  // --- queries ---

  __device__ __forceinline__ void load_queries(const Unit& unit, Query<Form>& query,
                                               float (&factor)[Form::kRowGroups][2]) const {
    const float scale = p_.scale * (p_.soft_cap != 0 ? 1 : kLog2E) * (p_.k_scale ? __ldg(p_.k_scale) : 1);
    const uint32_t rows = rows_of(p_, unit);
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      load_query(unit, rows, group, query[group]);
      const float own = Form::kIsFp8 ? fit_range<4>(query[group]) : 1;
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
    const RowPlace place = place_of(p_, unit, is_there ? row : 0);
    const uint16_t* const from = static_cast<const uint16_t*>(p_.query) +
                                 place.token * p_.query_token_stride + place.head * p_.query_head_stride;
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step) {
      query[step] = uint2{0, 0};
      if (is_there)
        query[step] = __ldg(reinterpret_cast<const uint2*>(from + element_of<Form>(step, lane() % 4)));
    }
  }

  // --- partial results of warps ---

  // Where a block has a slice's quad of a slot, and two rows' maxima and sums of it.
  __device__ __forceinline__ float4* received(uint32_t buffer) const {
    return reinterpret_cast<float4*>(shared_.received) + buffer * Form::received_quads(slot_rows(p_));
  }
  static __device__ __forceinline__ uint32_t quad_place(uint32_t row, uint32_t slot, uint32_t quad) {
    return (row * Form::kSlots + slot) * kSliceQuads + quad;
  }
  __device__ __forceinline__ uint32_t stats_place(uint32_t row_pair, uint32_t slot) const {
    return quad_place(slot_rows(p_), 0, 0) + row_pair * Form::kSlots + slot;
  }

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

  // To all blocks of the cluster: a slice to each, and maxima and sums to all.
  __device__ __forceinline__ void send(const Unit& unit, uint32_t slot, uint32_t buffer,
                                       const Partial<Form>& partial) const {
    const uint32_t rows = rows_of(p_, unit);
    float4* const to = received(buffer);
    const instruction::SharedPlace got = instruction::shared_place(&shared_.got[buffer]);
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      for_quads(partial, group, [&](uint32_t row, uint32_t quad, const float4& sums) {
        if (group * 8 + row >= rows) return;
        const uint32_t place = quad_place(group * 8 + row, slot, quad % kSliceQuads);
        instruction::send_to_rank(instruction::shared_place(to + place), quad / kSliceQuads, got, sums);
      });
      const uint32_t row_pair = group * 4 + lane() % 4, rank = lane() / 4;
      if (row_pair * 2 < rows && rank < Form::kRanks) {
        const float (&maximum)[2] = partial.maximum[group], (&total)[2] = partial.total[group];
        instruction::send_to_rank(instruction::shared_place(to + stats_place(row_pair, slot)), rank, got,
                                  make_float4(maximum[0], maximum[1], total[0], total[1]));
      }
    }
  }

  // --- sums of slices ---

  // Of a row's slice. Each lane has the quad of its number.
  struct Sum {
    float maximum, total;
    float4 quad;
  };

  __device__ __forceinline__ void add(uint32_t adder) {
    for_units([&](const Unit& unit, const Place& buffer) {
      const uint32_t rows = rows_of(p_, unit), slots = slots_of(unit);
      if (adder == 0 && lane() == 0) {
        const uint32_t quads = slots * (rows * kSliceQuads + (rows + 1) / 2);
        instruction::arrive_expecting(instruction::shared_place(&shared_.got[buffer.number]), quads * 16);
      }
      wait_for_cluster(shared_.got[buffer.number], buffer.parity);
      const float4* const from = received(buffer.number);
      // Loads of the next row come before the sum of this one.
      SlotParts parts;
      if (adder < rows) parts = load_slots(from, slots, adder);
      for (uint32_t row = adder; row < rows; row += Form::kAdders) {
        SlotParts next;
        if (row + Form::kAdders < rows) next = load_slots(from, slots, row + Form::kAdders);
        const Sum sum = add_slots(from, slots, row, parts);
        if (unit.splits == 1) {
          write_row(place_of(p_, unit, row), sum);
        } else {
          write_partial(unit, row, sum);
        }
        parts = next;
      }
      __syncwarp();
      if (lane() < Form::kRanks)
        instruction::arrive_at_rank_after_reads(instruction::shared_place(&shared_.free[buffer.number]), lane());
      if (unit.splits == 1 || adder >= rows || !is_last_split(unit, adder)) return;
      SplitParts of_splits = load_splits(unit, adder);
      for (uint32_t row = adder; row < rows; row += Form::kAdders) {
        SplitParts next;
        if (row + Form::kAdders < rows) next = load_splits(unit, row + Form::kAdders);
        add_splits(unit, row, of_splits);
        of_splits = next;
      }
    });
  }

  // What a lane has of a row's parts: 32 after 32, maxima and totals, and the first parts' quad.
  template <uint32_t Count>
  struct Parts {
    float maxima[Count], totals[Count];
    float4 quad;
  };
  static constexpr uint32_t kAtOnce = kLanes / kSliceQuads;  // parts whose quads a warp has

  using SlotParts = Parts<quotient_up(Form::kSlots, kLanes)>;
  __device__ __forceinline__ SlotParts load_slots(const float4* from, uint32_t slots, uint32_t row) const {
    SlotParts parts;
#pragma unroll
    for (uint32_t i = 0; i < quotient_up(Form::kSlots, kLanes); ++i) {
      const uint32_t slot = i * kLanes + lane();
      const float4 stats = slot < slots ? from[stats_place(row / 2, slot)]
                                        : make_float4(-INFINITY, -INFINITY, 0, 0);
      parts.maxima[i] = row % 2 == 0 ? stats.x : stats.y, parts.totals[i] = row % 2 == 0 ? stats.z : stats.w;
    }
    const uint32_t own = lane() / kSliceQuads;
    parts.quad = make_float4(0, 0, 0, 0);
    if (own < slots) parts.quad = from[quad_place(row, own, lane() % kSliceQuads)];
    return parts;
  }
  __device__ __forceinline__ Sum add_slots(const float4* from, uint32_t slots, uint32_t row,
                                           SlotParts& parts) const {
    return add_parts(parts, slots, [&](uint32_t slot, uint32_t quad) {
      return from[quad_place(row, slot, quad)];
    });
  }

  // load(part, quad of the slice).
  template <uint32_t Count, class F>
  static __device__ __forceinline__ Sum add_parts(Parts<Count>& of_row, uint32_t parts, F&& load) {
    const uint32_t own = lane() / kSliceQuads, number = lane() % kSliceQuads;
    float (&maxima)[Count] = of_row.maxima;
    const float (&totals)[Count] = of_row.totals;
    const float4 early = of_row.quad;
    Sum sum{maxima[0], 0, make_float4(0, 0, 0, 0)};
#pragma unroll
    for (uint32_t i = 1; i < Count; ++i) sum.maximum = fmaxf(sum.maximum, maxima[i]);
    sum.maximum = maximum_of_warp(sum.maximum);
    const float base = sum.maximum == -INFINITY ? 0 : sum.maximum;
#pragma unroll
    for (uint32_t i = 0; i < Count; ++i) maxima[i] = instruction::power_of_two(maxima[i] - base);
    float4& quad = sum.quad;
#pragma unroll
    for (uint32_t i = 0; i < Count; ++i) {
      if (i * kLanes >= parts) break;
#pragma unroll
      for (uint32_t in = 0; in < kLanes; in += kAtOnce) {
        const float weight = __shfl_sync(~0u, maxima[i], in + own);
        sum.total = fmaf(__shfl_sync(~0u, totals[i], in + own), weight, sum.total);
        const uint32_t part = i * kLanes + in + own;
        const float4 some = i + in == 0 ? early : part < parts ? load(part, number) : make_float4(0, 0, 0, 0);
        quad.x = fmaf(some.x, weight, quad.x), quad.y = fmaf(some.y, weight, quad.y);
        quad.z = fmaf(some.z, weight, quad.z), quad.w = fmaf(some.w, weight, quad.w);
      }
    }
#pragma unroll
    for (uint32_t mask = kSliceQuads; mask < kLanes; mask *= 2) {
      sum.total += shuffled(sum.total, mask);
      quad.x += shuffled(quad.x, mask), quad.y += shuffled(quad.y, mask);
      quad.z += shuffled(quad.z, mask), quad.w += shuffled(quad.w, mask);
    }
    return sum;
  }

  // In one instruction for the warp, by whole numbers in the order of the floats.
  static __device__ __forceinline__ float maximum_of_warp(float x) {
    constexpr uint32_t kSign = 1u << 31;
    const uint32_t bits = __float_as_uint(x);
    const uint32_t most = __reduce_max_sync(~0u, bits & kSign ? ~bits : bits | kSign);
    return __uint_as_float(most & kSign ? most ^ kSign : ~most);
  }

  __device__ __forceinline__ void write_row(const RowPlace& place, const Sum& sum) const {
    const float factor = finish_row(p_, place, sum.maximum, sum.total, lane() == 0 && rank_ == 0);
    if (lane() >= kSliceQuads) return;
    uint2* const out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + row_of(p_, place) * kDim);
    out[rank_ * kSliceQuads + lane()] =
        uint2{pair_of(sum.quad.x * factor, sum.quad.y * factor, false),
              pair_of(sum.quad.z * factor, sum.quad.w * factor, false)};
  }

  // --- partial results of splits, in global memory ---

  __device__ __forceinline__ float* split_place(const Unit& unit, uint32_t split) const {
    return p_.partials + size_t{unit.slot + split} * partial_floats(p_, kDim);
  }
  // In quads, from a split's place; maxima and sums of rows lie behind all rows.
  __device__ __forceinline__ uint32_t slice_place(uint32_t row) const {
    return row * Form::kQuads + rank_ * kSliceQuads;
  }

  // This block's slice of a row of this split. Each block of the cluster also writes the row's maximum and sum,
  // the same ones.
  __device__ __forceinline__ void write_partial(const Unit& unit, uint32_t row, const Sum& sum) const {
    const uint32_t rows = slot_rows(p_);
    float* const own = split_place(unit, unit.split);
    if (lane() < kSliceQuads) reinterpret_cast<float4*>(own)[slice_place(row) + lane()] = sum.quad;
    if (lane() == 0) own[rows * kDim + row] = sum.maximum, own[rows * kDim + rows + row] = sum.total;
  }

  // Whether all splits have this adder's rows.
  __device__ __forceinline__ bool is_last_split(const Unit& unit, uint32_t adder) const {
    uint32_t is_last = 0;
    if (lane() == 0) {
      const uint32_t pair = (unit.sequence * p_.kv_heads + unit.head) * row_tiles_of(p_) + unit.row_tile;
      uint32_t* const counter = p_.counters + (pair * Form::kAdders + adder) * Form::kRanks + rank_;
      is_last = instruction::count_in_order(counter) + 1 == unit.splits;
      if (is_last) *counter = 0;
    }
    is_last = __shfl_sync(~0u, is_last, 0);
    __syncwarp();
    return is_last != 0;
  }

  using SplitParts = Parts<kMostSplits / kLanes>;
  __device__ __forceinline__ const float4* split_slices(const Unit& unit, uint32_t row) const {
    return reinterpret_cast<const float4*>(split_place(unit, 0)) + slice_place(row);
  }
  __device__ __forceinline__ SplitParts load_splits(const Unit& unit, uint32_t row) const {
    const uint32_t splits = unit.splits, rows = slot_rows(p_);
    const size_t stride = partial_floats(p_, kDim);
    SplitParts parts;
#pragma unroll
    for (uint32_t i = 0; i < kMostSplits / kLanes; ++i) {
      const uint32_t split = i * kLanes + lane();
      const float* const stats = split_place(unit, split) + rows * kDim + row;
      parts.maxima[i] = split < splits ? __ldcg(stats) : -INFINITY;
      parts.totals[i] = split < splits ? __ldcg(stats + rows) : 0;
    }
    const uint32_t own = lane() / kSliceQuads;
    parts.quad = make_float4(0, 0, 0, 0);
    if (own < splits) parts.quad = __ldcg(split_slices(unit, row) + own * (stride / 4) + lane() % kSliceQuads);
    return parts;
  }
  __device__ __forceinline__ void add_splits(const Unit& unit, uint32_t row, SplitParts& parts) const {
    const size_t stride = partial_floats(p_, kDim);
    const float4* const slices = split_slices(unit, row);
    const Sum sum = add_parts(parts, unit.splits, [&](uint32_t split, uint32_t quad) {
      return __ldcg(slices + split * (stride / 4) + quad);
    });
    write_row(place_of(p_, unit, row), sum);
  }

  const Problem& p_;
  const CUtensorMap& map_;
  Shared<Form>& shared_;
  const uint32_t rank_, buffers_;
};

}  // namespace nibble::attention::clusters
