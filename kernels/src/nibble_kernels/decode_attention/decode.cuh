// Attention of a few query tokens a sequence over a paged cache of keys and values.
//
// Persistent thread blocks, whose warps go through their splits (work.cuh) by themselves. Where a block has
// all splits of a short sequence, its warps meet and add them from shared memory. The partial results of a
// longer sequence go to global memory; the block that brings the last one adds them when its warps have no
// more splits, the first one first.
#pragma once

#include "decode_attention/tile.cuh"

namespace nibble::attention {

template <class Form>
class Attention {
 public:
  __device__ __forceinline__ Attention(const Problem& p, Shared<Form>& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
    count_work(p_, shared_);
    go_through_splits();
    instruction::wait_for_copies<0>();
    if (shared_.split_ends[p_.sequences - 1] == 0) return;
    __syncthreads();
    for (uint32_t pair = shared_.finished; pair != 0;) pair = add_pair(pair - 1);
  }

 private:
  static constexpr uint32_t kDim = Form::kHeadDim, kQuads = kDim / 4;

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / kLanes; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }

  // A KV head of a sequence, for a tile of rows.
  struct Pair {
    uint32_t query_begin, queries, length, head, row_tile, rows;
  };
  __device__ __forceinline__ Pair pair_at(uint32_t sequence, uint32_t head, uint32_t row_tile) const {
    Pair pair{shared_.query_begins[sequence], 0, shared_.lengths[sequence], head, row_tile, 0};
    pair.queries = shared_.query_begins[sequence + 1] - pair.query_begin;
    const uint32_t rows = p_.group * pair.queries, before = row_tile * kRows;
    pair.rows = rows > before ? min(rows - before, kRows) : 0;
    return pair;
  }

  // Also the number of the query in its sequence.
  struct Place : RowPlace {
    uint32_t query;
  };
  __device__ __forceinline__ Place place_of(const Pair& pair, uint32_t row) const {
    if (p_.most_queries == 1) return {{pair.query_begin, pair.head * p_.group + row}, 0};
    const uint32_t all = pair.row_tile * kRows + row, query = all / p_.group;
    return {{pair.query_begin + query, pair.head * p_.group + all - query * p_.group}, query};
  }

  // --- splits ---

  __device__ __forceinline__ void go_through_splits() {
    Ring<Form> ring(p_, shared_, shared_.ring + warp() * (Form::kStages * Form::kPartBytes));
    Cursor<Form> cursor(p_, shared_);
    cursor.park(shared_.computing[warp()]);
    Query<Form> query;
    Rows<Form> rows;
#pragma unroll 1
    for (; !cursor.is_over; cursor.next(p_, shared_), cursor.park(shared_.computing[warp()])) {
      if (cursor.is_first_of_pair())
        look_at_pair(pair_at(cursor.sequence, cursor.head, cursor.row_tile), query, rows);
      Partial<Form> partial;
      clear(partial);
      // The place of the last tile, or of its values, takes the partial result of a warp whose block meets.
      const uint32_t begin = cursor.begin, end = begin + cursor.tiles * kTile;
      const uint32_t replaced = cursor.is_together && begin != end ? end - kTile : end;
#pragma unroll 1
      for (uint32_t token = begin; token != end; token += kTile) {
        Tile<Form> tile(shared_, ring.take());
        tile.weigh_keys(partial, rows, p_.soft_cap, token, query);
        if (Form::kParts == 2) {
          ring.replace(0);
          tile.values = ring.take();
        }
        tile.add_values(partial);
        if (token != replaced) ring.replace(Form::kParts - 1);
      }
      cursor = shared_.computing[warp()];
      add_totals(partial);
      if (cursor.is_together) {
        add_warps(cursor, partial, ring.oldest());
        if (cursor.tiles != 0) ring.replace(Form::kParts - 1);
      } else {
        write_partial(partial, slot_of(cursor.number));
        if (cursor.is_last_of_pair()) arrive(cursor);
      }
    }
  }

  __device__ __forceinline__ uint32_t pair_number(const Cursor<Form>& cursor) const {
    return (cursor.sequence * p_.kv_heads + cursor.head) * row_tiles_of(p_) + cursor.row_tile;
  }
  __device__ __forceinline__ float* slot_of(uint32_t number) const {
    return p_.partials + static_cast<size_t>(number) * partial_floats(p_, kDim);
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

  __device__ __forceinline__ void look_at_pair(const Pair& pair, Query<Form>& query, Rows<Form>& rows) {
    const float scale = p_.scale * (p_.soft_cap != 0 ? 1 : kLog2E) * (p_.k_scale ? __ldg(p_.k_scale) : 1);
    const uint32_t last = pair.rows == 0 ? 0 : pair.rows - 1;
    rows.all_first = seen_first(pair, place_of(pair, last).query);
    rows.all_end = seen_end(pair, place_of(pair, 0).query);
    if (lane() < kRows) {
      const uint32_t seen_by = place_of(pair, min(lane(), last)).query;
      shared_.row_first[warp()][lane()] = seen_first(pair, seen_by);
      shared_.row_end[warp()][lane()] = seen_end(pair, seen_by);
    }
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      load_query(pair, group, query[group]);
      const float own = Form::kIsFp8 ? fit_range<4>(query[group]) : 1;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t column = lane() % 4 * 2 + i;
        rows.factor[group][i] = scale * __uint_as_float(__shfl_sync(~0u, __float_as_uint(own), column * 4));
      }
    }
  }

  // Zeros where the pair has no such row.
  __device__ __forceinline__ void load_query(const Pair& pair, uint32_t group,
                                             uint2 (&query)[Form::kSteps]) const {
    const uint32_t row = group * 8 + lane() / 4;
    const bool is_there = row < pair.rows;
    const Place place = place_of(pair, is_there ? row : 0);
    const uint16_t* const from = static_cast<const uint16_t*>(p_.query) +
                                 place.token * p_.query_token_stride + place.head * p_.query_head_stride;
#pragma unroll
    for (uint32_t step = 0; step < Form::kSteps; ++step) {
      query[step] = uint2{0, 0};
      if (is_there)
        query[step] = __ldg(reinterpret_cast<const uint2*>(from + element_of<Form>(step, lane() % 4)));
    }
  }

  __device__ __forceinline__ uint32_t seen_end(const Pair& pair, uint32_t query) const {
    const uint32_t end = pair.length + query + 1;
    return end > pair.queries ? min(end - pair.queries, pair.length) : 0;
  }
  __device__ __forceinline__ uint32_t seen_first(const Pair& pair, uint32_t query) const {
    const uint32_t end = seen_end(pair, query);
    return p_.window != 0 && end > p_.window ? end - p_.window : 0;
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
          const float(&low)[4] = partial.sums[group][tile], (&high)[4] = partial.sums[group][tile + 1];
          f(2 * c + i, (load * 8 + r) * (Form::kPerLoad / 4) + quad,
            make_float4(low[i], low[2 + i], high[i], high[2 + i]));
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t quad_place(uint32_t row, uint32_t quad) {
    return row * kQuads + (quad ^ (row >> 1 & 3));  // apart, so that fewer lanes meet in a bank
  }

  __device__ __forceinline__ void add_warps(const Cursor<Form>& cursor, const Partial<Form>& partial,
                                            uint8_t* memory) {
    static_assert(8 * kDim * sizeof(float) <= Form::kPartBytes);
    const Pair pair = pair_at(cursor.sequence, cursor.head, cursor.row_tile);
    const uint32_t splits = cursor.length == cursor.first ? 0 : cursor.splits;
    if (lane() == 0) shared_.held[warp()] = static_cast<uint32_t>(memory - shared_.ring);
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      __syncwarp();
      if (cursor.tiles != 0) {
        float4* const quads = reinterpret_cast<float4*>(memory);
        for_quads(partial, group, [&](uint32_t row, uint32_t quad, const float4& sums) {
          quads[quad_place(row, quad)] = sums;
        });
        if (lane() < 4) {
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) {
            shared_.maxima[warp()][lane() * 2 + i] = partial.maximum[group][i];
            shared_.totals[warp()][lane() * 2 + i] = partial.total[group][i];
          }
        }
      }
      __syncthreads();
      const uint32_t rows = pair.rows > group * 8 ? min(pair.rows - group * 8, 8u) : 0;
      for (uint32_t i = threadIdx.x; i < rows * kQuads; i += Form::kThreads)
        write_of_warps(pair, group, i / kQuads, i % kQuads, splits);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void write_of_warps(const Pair& pair, uint32_t group, uint32_t row,
                                                 uint32_t quad, uint32_t splits) const {
    float maximum = -INFINITY, total = 0;
    for (uint32_t split = 0; split < splits; ++split) maximum = fmaxf(maximum, shared_.maxima[split][row]);
    const float base = maximum == -INFINITY ? 0 : maximum;
    float4 sum = make_float4(0, 0, 0, 0);
    for (uint32_t split = 0; split < splits; ++split) {
      const float weight = instruction::power_of_two(shared_.maxima[split][row] - base);
      total = fmaf(shared_.totals[split][row], weight, total);
      const float4 part =
          reinterpret_cast<const float4*>(shared_.ring + shared_.held[split])[quad_place(row, quad)];
      sum.x = fmaf(part.x, weight, sum.x), sum.y = fmaf(part.y, weight, sum.y);
      sum.z = fmaf(part.z, weight, sum.z), sum.w = fmaf(part.w, weight, sum.w);
    }
    const Place place = place_of(pair, group * 8 + row);
    const float factor = finish_row(p_, place, maximum, total, quad == 0);
    uint2* const out = reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + row_of(p_, place) * kDim);
    out[quad] = uint2{pair_of(sum.x * factor, sum.y * factor, false),
                      pair_of(sum.z * factor, sum.w * factor, false)};
  }

  // --- partial results in global memory ---

  __device__ __forceinline__ void write_partial(const Partial<Form>& partial, float* slot) const {
    const uint32_t rows = slot_rows(p_);
    float* const stats = slot + rows * kDim;
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      for_quads(partial, group, [&](uint32_t row, uint32_t quad, const float4& sums) {
        if (group * 8 + row < rows) reinterpret_cast<float4*>(slot)[(group * 8 + row) * kQuads + quad] = sums;
      });
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t row = group * 8 + lane() * 2 + i;
        if (lane() < 4 && row < rows)
          stats[row] = partial.maximum[group][i], stats[rows + row] = partial.total[group][i];
      }
    }
  }

  // Counts this warp's splits of a pair. A pair whose splits are all there joins the block's list; its
  // counter has the next one meanwhile.
  __device__ __forceinline__ void arrive(const Cursor<Form>& cursor) {
    __threadfence();
    __syncwarp();
    if (lane() == 0) {
      const uint32_t pair = pair_number(cursor), arrived = cursor.splits_of_pair();
      uint32_t* const counter = p_.counters + pair;
      if (atomicAdd(counter, arrived) + arrived == cursor.splits) {
        __threadfence();
        *counter = atomicExch(&shared_.finished, pair + 1);
      }
    }
    __syncwarp();
  }

  // Returns the next pair, plus one.
  __device__ __forceinline__ uint32_t add_pair(uint32_t number) {
    const uint32_t tiles = row_tiles_of(p_), heads = p_.kv_heads * tiles;
    const uint32_t sequence = number / heads, in_sequence = number - sequence * heads;
    const uint32_t head = in_sequence / tiles;
    const Pair pair = pair_at(sequence, head, in_sequence - head * tiles);
    const uint32_t splits = span_of_sequence(p_, shared_, sequence).splits;
    const uint32_t before = sequence == 0 ? 0 : shared_.split_ends[sequence - 1];
    const float* const slots = slot_of(before + in_sequence * splits);
    for (uint32_t row = warp(); row < pair.rows; row += Form::kWarps) weigh_splits(pair, slots, splits, row);
    const uint32_t next = __ldcg(p_.counters + number);
    __syncthreads();
    if (threadIdx.x == 0) p_.counters[number] = 0;
    const size_t stride = partial_floats(p_, kDim) / 2;
    for (uint32_t i = threadIdx.x; i < pair.rows * (kDim / 2); i += Form::kThreads) {
      const uint32_t row = i / (kDim / 2);
      const float* const weights = shared_.weights + row * kMostSplits;
      const float2* const parts = reinterpret_cast<const float2*>(slots) + i;
      float2 sum = make_float2(0, 0);
      uint32_t split = 0;
      for (; split + kAtOnce <= splits; split += kAtOnce) {
        float2 some[kAtOnce];
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) some[j] = __ldcg(parts + (split + j) * stride);
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) add_part(sum, some[j], weights[split + j]);
      }
#pragma unroll 4
      for (; split < splits; ++split) add_part(sum, __ldcg(parts + split * stride), weights[split]);
      uint32_t* const out = static_cast<uint32_t*>(p_.out) + row_of(p_, place_of(pair, row)) * (kDim / 2);
      out[i % (kDim / 2)] = pair_of(sum.x, sum.y, false);
    }
    __syncthreads();
    return next;
  }

  static constexpr uint32_t kAtOnce = 16;
  static __device__ __forceinline__ void add_part(float2& sum, const float2& part, float weight) {
    sum.x = fmaf(part.x, weight, sum.x), sum.y = fmaf(part.y, weight, sum.y);
  }

  // Maxima and totals of a row's splits -> what its splits are multiplied by.
  __device__ __forceinline__ void weigh_splits(const Pair& pair, const float* slots, uint32_t splits,
                                               uint32_t row) {
    const uint32_t rows = slot_rows(p_), stride = partial_floats(p_, kDim);
    const float* const stats = slots + rows * kDim + row;
    constexpr uint32_t kEach = kMostSplits / kLanes;
    float maxima[kEach], totals[kEach], maximum = -INFINITY, total = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t split = i * kLanes + lane();
      const bool is_there = split < splits;
      maxima[i] = is_there ? __ldcg(stats + size_t{split} * stride) : -INFINITY;
      totals[i] = is_there ? __ldcg(stats + size_t{split} * stride + rows) : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) maximum = fmaxf(maximum, maxima[i]);
#pragma unroll
    for (uint32_t mask = 1; mask < kLanes; mask *= 2) maximum = fmaxf(maximum, shuffled(maximum, mask));
    const float base = maximum == -INFINITY ? 0 : maximum;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      maxima[i] = instruction::power_of_two(maxima[i] - base);
      total = fmaf(totals[i], maxima[i], total);
    }
#pragma unroll
    for (uint32_t mask = 1; mask < kLanes; mask *= 2) total += shuffled(total, mask);
    const float factor = finish_row(p_, place_of(pair, row), maximum, total, lane() == 0);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t split = i * kLanes + lane();
      if (split < splits) shared_.weights[row * kMostSplits + split] = maxima[i] * factor;
    }
  }

  const Problem& p_;
  Shared<Form>& shared_;
};

}  // namespace nibble::attention
