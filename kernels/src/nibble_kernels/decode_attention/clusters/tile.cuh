// A warp's products with a tile of keys and values. Tokens and the head dim are the rows of products, queries
// their eight columns, so that few queries take few registers.
#pragma once

#include "decode_attention/clusters/division.h"
#include "decode_attention/row.cuh"

namespace nibble::attention::clusters {

template <class Form>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& a, const uint2& b) {
  if constexpr (Form::kIsFp8) {
    instruction::mma_halves(sum, a.x, a.y, a.z, a.w, b.x, b.y);
  } else {
    instruction::mma_bfloats(sum, a.x, a.y, a.z, a.w, b.x, b.y);
  }
}

__device__ __forceinline__ float shuffled(float x, uint32_t mask) {
  return __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(x), mask));
}

// Which 16 bytes of a key lane 4 r + c reads. The order of elements in the sum is free; with this one the
// lanes of two rows do not meet in a bank.
template <class Form>
__device__ __forceinline__ uint32_t unit_of(uint32_t read, uint32_t c) {
  if constexpr (Form::kHeadDim * Form::kElement < 128) return c;
  return read / 2 * 8 + 2 * c + read % 2;
}

// The first of four neighbouring elements of the head dim that this lane has in a step.
template <class Form>
__device__ __forceinline__ uint32_t element_of(uint32_t step, uint32_t c) {
  constexpr uint32_t kStepsPerRead = Form::kPerUnit / 4;
  return unit_of<Form>(step / kStepsPerRead, c) * Form::kPerUnit + step % kStepsPerRead * 4;
}

// Where 16 bytes of a token lie: chunks of 128 bytes of all tokens one after the other, whose units the
// copies swap.
__device__ __forceinline__ uint32_t place_in_tile(uint32_t token, uint32_t unit) {
  return unit / 8 * (kTile * 128) + token * 128 + ((unit ^ token) % 8) * 16;
}

// Queries as products take them: of lane 4 r + c query r.
template <class Form>
using Query = uint2[Form::kRowGroups][Form::kSteps];

// What a warp has of a unit's result. Lane 4 r + c has queries 2 c and 2 c + 1.
template <class Form>
struct Partial {
  // Of element j of a load: [j / 2][j % 2 * 2 + i] for query 2 c + i.
  float sums[Form::kRowGroups][Form::kDimTiles][4];
  float maximum[Form::kRowGroups][2], total[Form::kRowGroups][2];  // base 2; of this lane's tokens alone
};

template <class Form>
struct Scores {
  float of[Form::kRowGroups][4];
};

// scores = keys x queries. Even and odd steps have a sum each: a product waits for the one before it.
template <class Form>
__device__ __forceinline__ void score(Scores<Form>& scores, const uint8_t* tile, const Query<Form>& query) {
  const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4;
  constexpr uint32_t kStepsPerRead = Form::kPerUnit / 4, kSums = 2;
  float sums[Form::kRowGroups][kSums][4];
#pragma unroll
  for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
    for (uint32_t j = 0; j < kSums * 4; ++j) sums[group][j / 4][j % 4] = 0;
  }
#pragma unroll
  for (uint32_t read = 0; read < Form::kSteps / kStepsPerRead; ++read) {
    const uint8_t* const place = tile + place_in_tile(r, unit_of<Form>(read, c));
    const uint4 low = *reinterpret_cast<const uint4*>(place);
    const uint4 high = *reinterpret_cast<const uint4*>(place + 8 * 128);
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (uint32_t j = 0; j < kStepsPerRead; ++j) {
      uint4 key;
      if constexpr (Form::kIsFp8) {
        key = make_uint4(instruction::e4m3_pair(lows[j]), instruction::e4m3_pair(highs[j]),
                         instruction::e4m3_pair(lows[j] >> 16), instruction::e4m3_pair(highs[j] >> 16));
      } else {
        key = make_uint4(lows[2 * j], highs[2 * j], lows[2 * j + 1], highs[2 * j + 1]);
      }
#pragma unroll
      for (uint32_t group = 0; group < Form::kRowGroups; ++group)
        multiply<Form>(sums[group][j % kSums], key, query[group][read * kStepsPerRead + j]);
    }
  }
#pragma unroll
  for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) scores.of[group][j] = sums[group][0][j] + sums[group][1][j];
  }
}

template <class Form>
__device__ __forceinline__ void raise(Partial<Form>& partial, const Scores<Form>& scores, uint32_t group) {
  float factor[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    float maximum = fmaxf(scores.of[group][i], scores.of[group][2 + i]);
#pragma unroll
    for (uint32_t mask = 4; mask < kLanes; mask *= 2) maximum = fmaxf(maximum, shuffled(maximum, mask));
    maximum = fmaxf(maximum, partial.maximum[group][i]);
    factor[i] = instruction::power_of_two(partial.maximum[group][i] - (maximum == -INFINITY ? 0 : maximum));
    partial.maximum[group][i] = maximum;
    partial.total[group][i] *= factor[i];
  }
#pragma unroll
  for (uint32_t tile = 0; tile < Form::kDimTiles; ++tile) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) partial.sums[group][tile][j] *= factor[j % 2];
  }
}

// Scores become weights relative to the maximum so far.
template <class Form>
__device__ __forceinline__ void weigh(Scores<Form>& scores, Partial<Form>& partial) {
#pragma unroll
  for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
    float (&of)[4] = scores.of[group];
    float (&maxima)[2] = partial.maximum[group];
    const bool is_larger = fmaxf(of[0], of[2]) > maxima[0] || fmaxf(of[1], of[3]) > maxima[1];
    if (__any_sync(~0u, is_larger)) raise(partial, scores, group);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float base = maxima[i] == -INFINITY ? 0 : maxima[i];
      of[i] = instruction::power_of_two(of[i] - base);
      of[2 + i] = instruction::power_of_two(of[2 + i] - base);
      partial.total[group][i] += of[i] + of[2 + i];
    }
  }
}

template <class Form>
__device__ __forceinline__ void add_elements(Partial<Form>& partial, const uint2 (&weights)[Form::kRowGroups],
                                             uint32_t tile, const uint4& values) {
#pragma unroll
  for (uint32_t group = 0; group < Form::kRowGroups; ++group)
    multiply<Form>(partial.sums[group][tile], values, weights[group]);
}

// A word of each of four tokens' values: two elements of bfloat16, or four of FP8.
template <class Form>
__device__ __forceinline__ void add_word(Partial<Form>& partial, const uint2 (&weights)[Form::kRowGroups],
                                         uint32_t tile, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
  if constexpr (Form::kIsFp8) {
    const uint32_t low01 = __byte_perm(v0, v1, 0x5140), high01 = __byte_perm(v0, v1, 0x7362);
    const uint32_t low23 = __byte_perm(v2, v3, 0x5140), high23 = __byte_perm(v2, v3, 0x7362);
    add_elements(partial, weights, tile,
                 make_uint4(instruction::e4m3_pair(low01), instruction::e4m3_pair(low01 >> 16),
                            instruction::e4m3_pair(low23), instruction::e4m3_pair(low23 >> 16)));
    add_elements(partial, weights, tile + 1,
                 make_uint4(instruction::e4m3_pair(high01), instruction::e4m3_pair(high01 >> 16),
                            instruction::e4m3_pair(high23), instruction::e4m3_pair(high23 >> 16)));
  } else {
    add_elements(partial, weights, tile,
                 make_uint4(__byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
                            __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632)));
  }
}

template <class Form>
__device__ __forceinline__ void read_value(const uint8_t* tile, uint32_t token, uint32_t part,
                                           uint32_t (&words)[4]) {
  if constexpr (Form::kLoad == 16) {
    const uint32_t unit = Form::kChunks / 2 * 8 + part;
    const uint4 found = *reinterpret_cast<const uint4*>(tile + place_in_tile(token, unit));
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
  } else {
    const uint8_t* const place = tile + place_in_tile(token, 4 + part / 2) + part % 2 * 8;
    const uint2 found = *reinterpret_cast<const uint2*>(place);
    words[0] = found.x, words[1] = found.y;
  }
}

template <class Form>
__device__ __forceinline__ void add_values(Partial<Form>& partial, const Scores<Form>& scores,
                                           const uint8_t* tile) {
  const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4;
  uint2 weights[Form::kRowGroups];
#pragma unroll
  for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
    const float (&of)[4] = scores.of[group];
    weights[group].x = instruction::transpose_pairs(pair_of(of[0], of[1], Form::kIsFp8));
    weights[group].y = instruction::transpose_pairs(pair_of(of[2], of[3], Form::kIsFp8));
  }
#pragma unroll
  for (uint32_t load = 0; load < Form::kLoads; ++load) {
    uint32_t words[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      read_value<Form>(tile, 2 * c + i / 2 * 8 + i % 2, load * 8 + r, words[i]);
#pragma unroll
    for (uint32_t word = 0; word < Form::kLoad / 4; ++word) {
      add_word<Form>(partial, weights, load * (Form::kPerLoad / 2) + word * (2 / Form::kElement),
                     words[0][word], words[1][word], words[2][word], words[3][word]);
    }
  }
}

}  // namespace nibble::attention::clusters
