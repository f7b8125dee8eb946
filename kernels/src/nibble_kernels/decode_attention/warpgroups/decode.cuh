// Attention of a few query tokens a sequence over a paged cache of keys and values, on SM90.
//
// Persistent thread blocks. One warp copies the tiles of the block's units (work.cuh), one prepares their
// queries, and warpgroups multiply: each in turn has a tile of 64 tokens, with the queries as the columns of
// products. Two warps add up what the warpgroups have of a unit. Where a sequence has several splits, their
// results go to global memory. Behind its last unit each warp adds up the splits of its share of all rows,
// and waits for them: all blocks run at the same time. All sums are in a fixed order.
#pragma once

#include <type_traits>

#include "decode_attention/warpgroups/tile.cuh"

namespace nibble::attention::warpgroups {

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

inline constexpr float kLog2E = 1.4426950408889634f;
__device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }
// One arrival of the warp, after what its lanes did before.
__device__ __forceinline__ void arrive(uint64_t& barrier) {
  __syncwarp();
  if (lane() == 0) instruction::arrive(instruction::shared_place(&barrier));
}
__device__ __forceinline__ float base_of(float maximum) { return maximum == -INFINITY ? 0 : maximum; }
__device__ __forceinline__ float maximum_of_warp(float x) {
#pragma unroll
  for (uint32_t mask = 1; mask < kLanes; mask *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// How many warpgroups have tiles of a unit.
template <class Form>
__device__ __forceinline__ uint32_t slots_of(const Unit& unit) {
  return min(quotient_up(unit.tiles, kGroups), Form::kWorkers);
}
// Of a unit's partial results in shared memory: a row of a slot.
template <class Form>
__device__ __forceinline__ float* part_of(const Problem& p, Shared<Form>& shared, uint32_t buffer,
                                          uint32_t slot, uint32_t row) {
  float* const parts = reinterpret_cast<float*>(shared.parts + buffer * Form::part_bytes(slot_rows(p)));
  return parts + (slot * slot_rows(p) + row) * Form::kPartFloats;
}

// The warp that prepares queries.
template <class Form>
class QueryLoader {
 public:
  __device__ __forceinline__ QueryLoader(const Problem& p, Shared<Form>& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const float scale = p_.scale * (p_.soft_cap != 0 ? 1 : kLog2E) * (p_.k_scale ? __ldg(p_.k_scale) : 1);
    Place place;
#pragma unroll 1
    for (;;) {
      wait_for(shared_.known[place.number], place.parity);
      const Unit& unit = shared_.units[place.number];
      const bool is_end = unit.splits == 0;
      if (!is_end) load(unit, scale, shared_.queries[place.number], shared_.factors[place.number]);
      instruction::publish_to_products();
      arrive(shared_.ready[place.number]);
      if (is_end) return;
      arrive(shared_.forgotten[place.number]);
      place.advance(1, Form::kUnits);
    }
  }

 private:
  static constexpr uint32_t kLoads = Form::kHeadDim / 4 / kLanes, kAtOnce = 8;
  using Row = uint2[kLoads];  // four elements after four, in turn with the other lanes

  __device__ __forceinline__ void load(const Unit& unit, float scale, uint8_t* to, float* factors) const {
    const uint32_t rows = rows_of(p_, unit);
#pragma unroll 1
    for (uint32_t begin = 0; begin < Form::kColumns; begin += kAtOnce) {
      Row found[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const bool is_there = begin + i < rows;
        const RowPlace place = place_of(p_, unit, is_there ? begin + i : 0);
        const uint16_t* const from = static_cast<const uint16_t*>(p_.query) +
                                     place.token * p_.query_token_stride + place.head * p_.query_head_stride +
                                     lane() * 4;
#pragma unroll
        for (uint32_t j = 0; j < kLoads; ++j) {
          found[i][j] = uint2{0, 0};
          if (is_there) found[i][j] = __ldg(reinterpret_cast<const uint2*>(from + j * kLanes * 4));
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const float range = Form::kIsFp8 ? fit_range(found[i]) : 1;
        if (lane() == 0) factors[begin + i] = scale * range;
        store(found[i], begin + i, to);
      }
    }
  }

  static __device__ __forceinline__ void store(const Row& of_row, uint32_t row, uint8_t* to) {
#pragma unroll
    for (uint32_t i = 0; i < kLoads * 2; ++i) {
      const ElementPlace at = place_of_pair<Form>((i / 2 * kLanes + lane()) * 4 + i % 2 * 2);
      *reinterpret_cast<uint32_t*>(to + (at.piece * Form::kColumns + row) * 16 + at.at * 2) =
          i % 2 == 0 ? of_row[i / 2].x : of_row[i / 2].y;
    }
  }

  // Queries become float16 after a power of two that fits each row; what this rounds off is below 2^-25 of
  // the row's largest element. The result takes that back.
  static __device__ __forceinline__ float fit_range(Row& row) {
    uint32_t largest = 0;  // bits of the largest magnitude
#pragma unroll
    for (const uint2& x : row)
      largest =
          max(largest, max(max(x.x & 0x7fff, x.x >> 16 & 0x7fff), max(x.y & 0x7fff, x.y >> 16 & 0x7fff)));
    largest = __reduce_max_sync(~0u, largest);
    // 2^-e for a row whose largest element is in [2^e, 2^(e + 1)).
    const uint32_t exponent = max(min(largest >> 7, 252u), 2u);
    const float factor = __uint_as_float((254 - exponent) << 23);
    const auto fit = [&](uint32_t bits) {
      const __half2 pair = __floats2half2_rn(__uint_as_float(bits << 16) * factor,
                                             __uint_as_float(bits & 0xffff0000) * factor);
      return *reinterpret_cast<const uint32_t*>(&pair);
    };
#pragma unroll
    for (uint2& x : row) x.x = fit(x.x), x.y = fit(x.y);
    return __uint_as_float(exponent << 23);
  }

  const Problem& p_;
  Shared<Form>& shared_;
};

// A warpgroup that multiplies.
template <class Form>
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Problem& p, Shared<Form>& shared, uint32_t worker,
                                        uint32_t buffers)
      : p_(p), shared_(shared), worker_(worker), buffers_(buffers), stage_{worker, 0} {}

  // Returns whether a sequence has several splits.
  __device__ __forceinline__ bool run() {
    return for_units(shared_, shared_.ready, buffers_,
                     [&](const Unit& unit, uint32_t number, const Place& buffer) {
                       const uint32_t slot = (worker_ + Form::kWorkers - unit.first_worker) % Form::kWorkers;
                       const bool has_tiles = slot < slots_of<Form>(unit);
                       Partial<Form> partial;
                       if (has_tiles) compute(unit, number, slot, partial);
                       // Also without tiles: who misses a phase could take one for another.
                       wait_for(shared_.free[buffer.number], buffer.parity ^ 1);
                       if (has_tiles) write_partial(unit, buffer.number, slot, partial);
                       arrive(shared_.got[buffer.number]);
                     });
  }

 private:
  static constexpr uint32_t kColumns = Form::kColumns;
  // Weights are at most two to the power of this: their reference follows the scores when it has to.
  static constexpr float kMostWeight = 8;

  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x % (Form::kWarps * kLanes); }
  static __device__ __forceinline__ uint32_t warp() { return thread() / kLanes; }
  // Of this lane's: the column of a group of eight.
  static __device__ __forceinline__ uint32_t column(uint32_t group, uint32_t i) {
    return group * 8 + lane() % 4 * 2 + i;
  }
  __device__ __forceinline__ void meet() const { instruction::meet_warpgroup(worker_); }
  // Of a warp, for this lane's columns. A warp may be a unit ahead of another when that reads the totals.
  __device__ __forceinline__ float& maximum_of(uint32_t warp, uint32_t i) const {
    return shared_.maxima[worker_][warp][column(i / 2, i % 2)];
  }
  __device__ __forceinline__ float& total_of(uint32_t warp, uint32_t i) const {
    return shared_.totals[worker_][warp][column(i / 2, i % 2)];
  }

  __device__ __forceinline__ void compute(const Unit& unit, uint32_t number, uint32_t slot,
                                          Partial<Form>& partial) {
    float factor[Form::kRowGroups][2];  // of a product: the scale, in base 2 unless scores are capped
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i)
      factor[i / 2][i % 2] = shared_.factors[number][column(i / 2, i % 2)];
    clear(partial);
    const uint32_t tiles = quotient_up(unit.tiles, kGroups);
    const uint32_t seen_by_all = seen_first(p_, unit, unit.queries == 0 ? 0 : unit.queries - 1);
    const uint32_t seen_end_by_all = seen_end(unit, 0);
    uint32_t used = 0;
#pragma unroll 1
    for (uint32_t tile = slot, turn = 0; tile < tiles; tile += Form::kWorkers, ++turn) {
      const uint32_t token = unit.begin + tile * kTokens;
      uint8_t* const memory = shared_.ring + stage_.number * Form::kTileBytes;
      uint8_t* const weights = shared_.weights[worker_][turn % 2];
      wait_for(shared_.full[stage_.number], stage_.parity);
      if (token < unit.first || token + kTokens > unit.length) clear_unseen(unit, token, memory);
      Scores<Form> scores;
      score<Form>(scores, shared_.queries[number], memory);
      // The products with the values before are over, too.
      if (Form::kFreesLate && turn != 0) arrive(shared_.empty[used]);
      scale(scores, factor);
      if (token < seen_by_all || token + kTokens > seen_end_by_all) hide(unit, token, scores);
      if constexpr (Form::kIsFp8) {
        Values<Form> first, second;
        load_values<Form>(memory, 0, first);
        weigh(scores, partial, turn == 0, weights);
        add_values<Form>(partial, weights, 0, first);
        load_values<Form>(memory, 1, second);
        add_values<Form>(partial, weights, 1, second);
        instruction::wait_for_products<0>();
        keep(first), keep(second);
      } else {
        weigh(scores, partial, turn == 0, weights);
        add_values<Form>(partial, weights, memory);
        if (!Form::kFreesLate) instruction::wait_for_products<0>();
      }
      if (!Form::kFreesLate) arrive(shared_.empty[stage_.number]);
      used = stage_.number;
      stage_.advance(Form::kWorkers, Form::kStages);
    }
    if (Form::kFreesLate) {
      instruction::wait_for_products<0>();
      arrive(shared_.empty[used]);
    }
    add_totals(partial);
  }

  static __device__ __forceinline__ void keep(const Values<Form>& values) {
#pragma unroll
    for (uint32_t i = 0; i < kHalf; ++i) instruction::keep(values.of[i]);
  }

  static __device__ __forceinline__ void clear(Partial<Form>& partial) {
#pragma unroll
    for (uint32_t i = 0; i < Form::kDimTiles * kColumns / 2; ++i)
      partial.sums[i / (kColumns / 2)][i % (kColumns / 2)] = 0;
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i)
      partial.reference[i / 2][i % 2] = -INFINITY, partial.total[i / 2][i % 2] = 0;
  }

  // --- scores and weights ---

  // Tokens that no query sees may be anything, also NaN: they become zero.
  __device__ __forceinline__ void clear_unseen(const Unit& unit, uint32_t begin, uint8_t* tile) const {
#pragma unroll 1
    for (uint32_t i = thread(); i < Form::kTileBytes / 16; i += Form::kWarps * kLanes) {
      const uint32_t token =
          begin + i * 16 / Form::kPieceBytes * Form::kPieceTokens + i / 8 % Form::kPieceTokens;
      if (token < unit.first || token >= unit.length)
        *reinterpret_cast<uint4*>(tile + i * 16) = make_uint4(0, 0, 0, 0);
    }
    instruction::publish_to_products();
    meet();
  }

  __device__ __forceinline__ void scale(Scores<Form>& scores,
                                        const float (&factor)[Form::kRowGroups][2]) const {
#pragma unroll
    for (uint32_t j = 0; j < kColumns / 2; ++j) scores.of[j] *= factor[j / 4][j % 2];
    if (p_.soft_cap == 0) return;
#pragma unroll
    for (float& score : scores.of) score = tanhf(score / p_.soft_cap) * (p_.soft_cap * kLog2E);
  }

  __device__ __forceinline__ void hide(const Unit& unit, uint32_t begin, Scores<Form>& scores) const {
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i) {
      const uint32_t query = query_of(p_, unit, column(i / 2, i % 2));
      const uint32_t first = seen_first(p_, unit, query), end = seen_end(unit, query);
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t token = begin + warp() * kTile + lane() / 4 + j * 8;
        if (token < first || token >= end) scores.of[i / 2 * 4 + j * 2 + i % 2] = -INFINITY;
      }
    }
  }

  // Scores become weights, also in shared memory, and are counted.
  __device__ __forceinline__ void weigh(Scores<Form>& scores, Partial<Form>& partial, bool is_first,
                                        uint8_t* to) const {
    bool is_above = is_first;
    Scores<Form> weights;
    if (!is_first) {
#pragma unroll
      for (uint32_t j = 0; j < kColumns / 2; ++j)
        is_above = is_above || scores.of[j] > partial.reference[j / 4][j % 2] + kMostWeight;
      write(scores, partial, to, weights);
      is_above = instruction::any_of_warpgroup(worker_, is_above);
    }
    if (is_above) {
      raise(scores, partial);
      write(scores, partial, to, weights);
      meet();
    }
#pragma unroll
    for (uint32_t j = 0; j < kColumns / 2; ++j) partial.total[j / 4][j % 2] += weights.of[j];
  }

  __device__ __forceinline__ void write(const Scores<Form>& scores, const Partial<Form>& partial, uint8_t* to,
                                        Scores<Form>& weights) const {
#pragma unroll
    for (uint32_t j = 0; j < kColumns / 2; ++j)
      weights.of[j] = instruction::power_of_two(scores.of[j] - base_of(partial.reference[j / 4][j % 2]));
    write_weights<Form>(weights, to);
    instruction::publish_to_products();
  }

  // The reference becomes the maximum of all tokens so far.
  __device__ __forceinline__ void raise(const Scores<Form>& scores, Partial<Form>& partial) const {
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i) {
      float maximum = fmaxf(scores.of[i / 2 * 4 + i % 2], scores.of[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
      for (uint32_t mask = 4; mask < kLanes; mask *= 2)
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, mask));
      if (lane() < 4) maximum_of(warp(), i) = maximum;
    }
    meet();
    float factor[Form::kRowGroups][2];
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i) {
      float& reference = partial.reference[i / 2][i % 2];
      float maximum = reference;
#pragma unroll
      for (uint32_t j = 0; j < Form::kWarps; ++j) maximum = fmaxf(maximum, maximum_of(j, i));
      factor[i / 2][i % 2] = instruction::power_of_two(reference - base_of(maximum));
      reference = maximum;
      partial.total[i / 2][i % 2] *= factor[i / 2][i % 2];
    }
#pragma unroll
    for (uint32_t i = 0; i < Form::kDimTiles; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kColumns / 2; ++j) partial.sums[i][j] *= factor[j / 4][j % 2];
    }
  }

  // Of all lanes and warps.
  __device__ __forceinline__ void add_totals(Partial<Form>& partial) const {
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i) {
      float total = partial.total[i / 2][i % 2];
#pragma unroll
      for (uint32_t mask = 4; mask < kLanes; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      if (lane() < 4) total_of(warp(), i) = total;
    }
    meet();
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i) {
      float& total = partial.total[i / 2][i % 2];
      total = 0;
#pragma unroll
      for (uint32_t j = 0; j < Form::kWarps; ++j) total += total_of(j, i);
    }
  }

  // Of the rows of the unit, to the warps that add up.
  __device__ __forceinline__ void write_partial(const Unit& unit, uint32_t buffer, uint32_t slot,
                                                const Partial<Form>& partial) const {
    const uint32_t rows = rows_of(p_, unit), r = lane() / 4;
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 4; ++i) {
      const uint32_t row = column(i / 2, i % 2), low = i / 2 * 4 + i % 2, high = low + 2;
      if (row >= rows) continue;
      float* const to = part_of<Form>(p_, shared_, buffer, slot, row);
#pragma unroll
      for (uint32_t tile = 0; tile < Form::kDimTiles; ++tile) {
        const float (&sums)[kColumns / 2] = partial.sums[tile];
        if constexpr (!Form::kIsFp8) {
          to[tile * 64 + warp() * 16 + r] = sums[low], to[tile * 64 + warp() * 16 + r + 8] = sums[high];
        } else if (tile % 2 == 0) {
          const float (&more)[kColumns / 2] = partial.sums[tile + 1];
          *reinterpret_cast<float4*>(to + tile * 64 + (warp() * 8 + r) * 4) =
              make_float4(sums[low], sums[high], more[low], more[high]);
        }
      }
      if (thread() < 4)
        to[Form::kHeadDim] = partial.reference[i / 2][i % 2],
        to[Form::kHeadDim + 1] = partial.total[i / 2][i % 2];
    }
  }

  const Problem& p_;
  Shared<Form>& shared_;
  const uint32_t worker_, buffers_;
  Place stage_;
};

// Sums of rows, and where they go.
template <class Form>
class Rows {
 public:
  static constexpr uint32_t kDim = Form::kHeadDim;

  // Of a row, in quads of elements: Quads of them of each lane.
  template <uint32_t Quads>
  struct Sum {
    float maximum, total;
    float4 quads[Quads];
  };

  __device__ __forceinline__ explicit Rows(const Problem& p) : p_(p) {}

  static __device__ __forceinline__ void add(float4& sum, const float4& more, float factor) {
    sum.x = fmaf(more.x, factor, sum.x), sum.y = fmaf(more.y, factor, sum.y);
    sum.z = fmaf(more.z, factor, sum.z), sum.w = fmaf(more.w, factor, sum.w);
  }

  // Of a KV head and 16 rows of a sequence: parts of its splits that are in global memory, and parts of rows
  // that were added up. Zero between calls.
  __device__ __forceinline__ uint32_t pair_of(const attention::Unit& unit) const {
    return (unit.sequence * p_.kv_heads + unit.head) * row_tiles_of(p_) + unit.row_tile;
  }
  __device__ __forceinline__ uint32_t* counters_of(const attention::Unit& unit) const {
    return p_.counters + pair_of(unit) * kRows * kRanks;
  }
  // A split in global memory: rows, then their references, then their sums of weights.
  __device__ __forceinline__ float* split_place(const attention::Unit& unit, uint32_t split) const {
    return p_.partials + (size_t{pair_of(unit)} * p_.most_splits + split) * partial_floats(p_, kDim);
  }
  __device__ __forceinline__ float* stats_of(float* split, uint32_t row) const {
    return split + slot_rows(p_) * kDim + row;
  }

  // Of a row from this quad on.
  template <uint32_t Quads>
  __device__ __forceinline__ void write_row(const RowPlace& place, uint32_t begin,
                                            const Sum<Quads>& sum) const {
    const float factor = finish_row(place, sum.maximum, sum.total, begin == 0);
    uint2* const out =
        reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + row_of(p_, place) * kDim) + begin;
#pragma unroll
    for (uint32_t i = 0; i < Quads; ++i) {
      const float4& x = sum.quads[i];
      const __nv_bfloat162 low = __floats2bfloat162_rn(x.x * factor, x.y * factor),
                           high = __floats2bfloat162_rn(x.z * factor, x.w * factor);
      out[i * kLanes + lane()] =
          uint2{*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
    }
  }

  // What a row's sum of values is multiplied by. A lane also writes the log-sum-exp, where it shall.
  __device__ __forceinline__ float finish_row(const RowPlace& place, float maximum, float total,
                                              bool writes) const {
    constexpr float kLn2 = 0.6931471805599453f;
    float factor = p_.v_scale ? __ldg(p_.v_scale) : 1;
    if (p_.sinks != nullptr) {
      const float sink = __ldg(p_.sinks + place.head) * kLog2E, top = fmaxf(maximum, sink);
      const float of_keys = instruction::power_of_two(maximum - top);
      total = fmaf(total, of_keys, instruction::power_of_two(sink - top));
      factor *= of_keys;
      maximum = top;
    }
    if (writes && lane() == 0 && p_.lse != nullptr)
      p_.lse[row_of(p_, place)] = total > 0 ? (maximum + log2f(total)) * kLn2 : -INFINITY;
    return total == 0 ? 0 : factor / total;
  }

 protected:
  const Problem& p_;
};

// A warp that adds up what a block has: of a unit's rows each kAdders-th.
template <class Form>
class Adder : Rows<Form> {
 public:
  __device__ __forceinline__ Adder(const Problem& p, Shared<Form>& shared, uint32_t adder, uint32_t buffers)
      : Rows<Form>(p), shared_(shared), adder_(adder), buffers_(buffers) {}

  __device__ __forceinline__ void run() {
    for_units(shared_, shared_.known, buffers_, [&](const Unit& unit, uint32_t, const Place& buffer) {
      const uint32_t rows = rows_of(p_, unit);
      wait_for(shared_.got[buffer.number], buffer.parity);
#pragma unroll 1
      for (uint32_t row = adder_; row < rows; row += Form::kAdders) add_slots(unit, buffer.number, row);
      arrive(shared_.free[buffer.number]);
      if (unit.splits > 1 && adder_ < rows && lane() == 0) instruction::add_release(this->counters_of(unit));
    });
  }

 private:
  using Rows<Form>::p_, Rows<Form>::kDim;
  static constexpr uint32_t kQuads = kDim / 4 / kLanes;

  __device__ __forceinline__ void add_slots(const Unit& unit, uint32_t buffer, uint32_t row) const {
    const uint32_t slots = slots_of<Form>(unit);
    typename Rows<Form>::template Sum<kQuads> sum{-INFINITY, 0, {}};
    const auto part = [&](uint32_t slot) { return part_of<Form>(p_, shared_, buffer, slot, row); };
    for (uint32_t slot = 0; slot < slots; ++slot) sum.maximum = fmaxf(sum.maximum, part(slot)[kDim]);
#pragma unroll
    for (uint32_t slot = 0; slot < Form::kWorkers; ++slot) {
      if (slot >= slots) break;
      const float* const from = part(slot);
      const float factor = instruction::power_of_two(from[kDim] - base_of(sum.maximum));
      sum.total = fmaf(from[kDim + 1], factor, sum.total);
#pragma unroll
      for (uint32_t i = 0; i < kQuads; ++i)
        this->add(sum.quads[i], reinterpret_cast<const float4*>(from)[i * kLanes + lane()], factor);
    }
    if (unit.splits == 1) return this->write_row(place_of(p_, unit, row), 0, sum);
    float* const own = this->split_place(unit, unit.split);
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i)
      reinterpret_cast<float4*>(own + row * kDim)[i * kLanes + lane()] = sum.quads[i];
    float* const stats = this->stats_of(own, row);
    if (lane() == 0) stats[0] = sum.maximum, stats[slot_rows(p_)] = sum.total;
  }

  Shared<Form>& shared_;
  const uint32_t adder_, buffers_;
};

// Adds up splits in global memory: 128 elements of a row for each of the grid's warps, then the next ones.
template <class Form>
class Merger : Rows<Form> {
 public:
  using Rows<Form>::Rows;

  // A warp of `warps` of each block.
  __device__ __forceinline__ void run(uint32_t warp, uint32_t warps) const {
    const uint32_t most = slot_rows(p_), pairs = p_.kv_heads * row_tiles_of(p_), each = pairs * most * kParts;
#pragma unroll 1
    for (uint32_t item = warp * gridDim.x + blockIdx.x; item < p_.sequences * each;
         item += warps * gridDim.x) {
      const uint32_t in = item % each, pair = in / (most * kParts), row = in / kParts % most;
      attention::Unit unit{};
      unit.sequence = item / each;
      unit.query_begin = static_cast<uint32_t>(__ldg(p_.query_begins + unit.sequence));
      unit.queries = static_cast<uint32_t>(__ldg(p_.query_begins + unit.sequence + 1)) - unit.query_begin;
      const uint32_t length = static_cast<uint32_t>(max(__ldg(p_.lengths + unit.sequence), 0));
      unit.splits = Division::splits_of(p_, undivided_span(p_, length, unit.queries).tiles);
      unit.head = pair / row_tiles_of(p_), unit.row_tile = pair % row_tiles_of(p_);
      if (unit.splits > 1 && row < rows_of(p_, unit)) add_splits(unit, row, in % kParts);
    }
  }

 private:
  using Rows<Form>::p_, Rows<Form>::kDim;
  static constexpr uint32_t kParts = kDim / 128;

  __device__ __forceinline__ void add_splits(const attention::Unit& unit, uint32_t row, uint32_t part) const {
    constexpr uint32_t kEach = quotient_up(Division::kMostSplits, kLanes), kAtOnce = 8;
    const size_t stride = partial_floats(p_, kDim);
    float* const first = this->split_place(unit, 0);
    const uint32_t rows = rows_of(p_, unit), adders = min(rows, Form::kAdders);
    uint32_t* const counters = this->counters_of(unit);
    if (lane() == 0) instruction::wait_until_reached(counters, unit.splits * adders);
    __syncwarp();
    float factors[kEach], totals[kEach];
    typename Rows<Form>::template Sum<1> sum{-INFINITY, 0, {}};
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t split = i * kLanes + lane();
      const float* const stats = this->stats_of(first + split * stride, row);
      factors[i] = split < unit.splits ? __ldcg(stats) : -INFINITY;
      totals[i] = split < unit.splits ? __ldcg(stats + slot_rows(p_)) : 0;
      sum.maximum = fmaxf(sum.maximum, factors[i]);
    }
    sum.maximum = maximum_of_warp(sum.maximum);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      factors[i] = instruction::power_of_two(factors[i] - base_of(sum.maximum));
      sum.total = fmaf(totals[i], factors[i], sum.total);
    }
#pragma unroll
    for (uint32_t mask = 1; mask < kLanes; mask *= 2) sum.total += __shfl_xor_sync(~0u, sum.total, mask);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t end = min(unit.splits, (i + 1) * kLanes);
#pragma unroll 1
      for (uint32_t begin = i * kLanes; begin < end; begin += kAtOnce) {
        float4 found[kAtOnce];
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          const float* const from = first + (begin + j) * stride + row * kDim + part * 128 + lane() * 4;
          found[j] =
              begin + j < end ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j)
          this->add(sum.quads[0], found[j], __shfl_sync(~0u, factors[i], begin % kLanes + j));
      }
    }
    this->write_row(place_of(p_, unit, row), part * kLanes, sum);
    // The last one clears the counters for the next call.
    if (lane() == 0 && instruction::count_in_order(counters + 1) + 1 == rows * kParts)
      counters[0] = counters[1] = 0;
  }
};

// By one thread.
template <class Form>
__device__ __forceinline__ void init_barriers(Shared<Form>& shared) {
  const auto init = [](auto& barriers, uint32_t arrivals) {
    for (uint64_t& barrier : barriers)
      instruction::init_barrier(instruction::shared_place(&barrier), arrivals);
  };
  constexpr uint32_t kMultiplying = Form::kWorkers * Form::kWarps;
  init(shared.full, 1), init(shared.empty, Form::kWarps);
  init(shared.known, 1), init(shared.ready, 1), init(shared.forgotten, kMultiplying + Form::kAdders + 1);
  init(shared.got, kMultiplying), init(shared.free, Form::kAdders);
  instruction::publish_barriers();
}

template <class Form>
__device__ __forceinline__ void run(const Problem& p, const CUtensorMap& map, Shared<Form>& shared) {
  constexpr uint32_t kMultiplying = Form::kWorkers * Form::kWarps;
  const uint32_t buffers = min(Form::kPartBytes / Form::part_bytes(slot_rows(p)), Form::kMostBuffers);
  const uint32_t warp = threadIdx.x / kLanes;
  instruction::let_next_kernel_start();
  if (threadIdx.x == 0) {
    instruction::prefetch_map(map);
    init_barriers(shared);
  }
  __syncthreads();
  if (warp < kMultiplying) {
    // From a lane of the warp, so that the compiler knows it is the same in all.
    const uint32_t worker = __shfl_sync(~0u, warp / Form::kWarps, 0);
    const bool has_splits = Multiplier<Form>(p, shared, worker, buffers).run();
    if (!has_splits) return;
    instruction::wait_for_previous_kernel();
    Merger<Form>(p).run(warp, kMultiplying);
  } else if (warp == kMultiplying) {
    Copier<Form>(p, map, shared).run();
  } else {
    instruction::wait_for_previous_kernel();
    if (warp == kMultiplying + 1) {
      QueryLoader<Form>(p, shared).run();
    } else {
      Adder<Form>(p, shared, warp - kMultiplying - 2, buffers).run();
    }
  }
}

#endif
}  // namespace nibble::attention::warpgroups
