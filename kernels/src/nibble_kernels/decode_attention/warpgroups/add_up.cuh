// The sums of what warpgroups, and of what blocks have of a sequence, in a fixed order.
#pragma once

#include "decode_attention/warpgroups/work.cuh"

namespace nibble::attention::warpgroups {

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

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
  __device__ __forceinline__ uint32_t number_of_pair(const attention::Unit& unit) const {
    return (unit.sequence * p_.kv_heads + unit.head) * row_tiles_of(p_) + unit.row_tile;
  }
  __device__ __forceinline__ uint32_t* counters_of(const attention::Unit& unit) const {
    return p_.counters + number_of_pair(unit) * kRows * kRanks;
  }
  // A split in global memory: rows, then their references, then their sums of weights.
  __device__ __forceinline__ float* split_place(const attention::Unit& unit, uint32_t split) const {
    return p_.partials + (size_t{number_of_pair(unit)} * p_.most_splits + split) * partial_floats(p_, kDim);
  }
  __device__ __forceinline__ float* stats_of(float* split, uint32_t row) const {
    return split + slot_rows(p_) * kDim + row;
  }

  // Of a row from this quad on.
  template <uint32_t Quads>
  __device__ __forceinline__ void write_row(const RowPlace& place, uint32_t begin,
                                            const Sum<Quads>& sum) const {
    const float factor = finish_row(p_, place, sum.maximum, sum.total, begin == 0 && lane() == 0);
    uint2* const out =
        reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + row_of(p_, place) * kDim) + begin;
#pragma unroll
    for (uint32_t i = 0; i < Quads; ++i) {
      const float4& x = sum.quads[i];
      out[i * kLanes + lane()] =
          uint2{pair_of(x.x * factor, x.y * factor, false), pair_of(x.z * factor, x.w * factor, false)};
    }
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
    uint32_t waited = 0;
    if (lane() == 0) {
      instruction::wait_until_reached(counters, unit.splits * adders);
      waited = atomicAdd(counters + 1, 1);
    }
    __syncwarp();
    float4 found[kAtOnce];
    const auto load = [&](uint32_t begin) {
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const float* const from = first + (begin + j) * stride + row * kDim + part * 128 + lane() * 4;
        found[j] = begin + j < unit.splits ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
      }
    };
    load(0);
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
        if (begin != 0) load(begin);
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j)
          this->add(sum.quads[0], found[j], __shfl_sync(~0u, factors[i], begin % kLanes + j));
      }
    }
    this->write_row(place_of(p_, unit, row), part * kLanes, sum);
    // The last one that has waited clears the counters for the next call.
    if (lane() == 0 && waited + 1 == rows * kParts) counters[0] = counters[1] = 0;
  }
};

#endif
}  // namespace nibble::attention::warpgroups
