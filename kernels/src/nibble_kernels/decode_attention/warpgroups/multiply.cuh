// The warpgroups that multiply: scores, their weights, and sums of values.
#pragma once

#include "decode_attention/warpgroups/tile.cuh"

namespace nibble::attention::warpgroups {

#if NIBBLE_HAS_WARPGROUP_PRODUCTS

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

#endif
}  // namespace nibble::attention::warpgroups
