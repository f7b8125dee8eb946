// A warp's products with a tile of keys and values. Tokens and the head dim are the rows of products, queries
// their eight columns, so that few queries take few registers.
#pragma once

#include "decode_attention/row.cuh"
#include "decode_attention/work.cuh"

namespace nibble::attention {

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

// The first of four neighbouring elements of the head dim that lane 4 r + c has in a step. A key's 16 bytes
// are then those of one read, and their order in the sum is free.
template <class Form>
__device__ __forceinline__ uint32_t element_of(uint32_t step, uint32_t c) {
  constexpr uint32_t kStepsPerRead = Form::kIsFp8 ? 4 : 2, kPerRead = 16 / Form::kElement;
  return step / kStepsPerRead * 4 * kPerRead + c * kPerRead + step % kStepsPerRead * 4;
}

// Queries as products take them: of lane 4 r + c query r.
template <class Form>
using Query = uint2[Form::kRowGroups][Form::kSteps];

// What a warp has of a split's result. Lane 4 r + c has queries 2 c and 2 c + 1.
template <class Form>
struct Partial {
  // Of element j of a load: [j / 2][j % 2 * 2 + i] for query 2 c + i.
  float sums[Form::kRowGroups][Form::kDimTiles][4];
  float maximum[Form::kRowGroups][2], total[Form::kRowGroups][2];  // base 2; of this lane's tokens alone
};

template <class Form>
struct Rows {
  float factor[Form::kRowGroups][2];  // of a product: the scale, in base 2 unless scores are capped
  uint32_t all_first, all_end;        // tokens that all rows see
};

template <class Form>
class Tile {
 public:
  const uint8_t* values;  // after the keys where they are copied together

  __device__ __forceinline__ Tile(const Shared<Form>& shared, const uint8_t* memory)
      : values(memory), shared_(shared), keys_(memory) {}

  __device__ __forceinline__ void weigh_keys(Partial<Form>& partial, const Rows<Form>& rows, float soft_cap,
                                             uint32_t begin, const Query<Form>& query) {
    score(query);
    scale(rows, soft_cap);
    if (begin < rows.all_first || begin + kTile > rows.all_end) hide(begin);
    weigh(partial);
  }

  __device__ __forceinline__ void add_values(Partial<Form>& partial) {
    const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4;
    uint2 weights[Form::kRowGroups];
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      const float(&scores)[4] = scores_[group];
      weights[group].x = instruction::transpose_pairs(pair_of(scores[0], scores[1], Form::kIsFp8));
      weights[group].y = instruction::transpose_pairs(pair_of(scores[2], scores[3], Form::kIsFp8));
    }
#pragma unroll
    for (uint32_t load = 0; load < Form::kLoads; ++load) {
      uint32_t words[4][4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) read_value(2 * c + i / 2 * 8 + i % 2, load * 8 + r, words[i]);
#pragma unroll
      for (uint32_t word = 0; word < Form::kLoad / 4; ++word) {
        add_word(partial, weights, load * (Form::kPerLoad / 2) + word * (2 / Form::kElement), words[0][word],
                 words[1][word], words[2][word], words[3][word]);
      }
    }
  }

 private:
  // scores_ = keys x queries.
  __device__ __forceinline__ void score(const Query<Form>& query) {
    const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4;
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) scores_[group][j] = 0;
    }
    constexpr uint32_t kStepsPerRead = Form::kIsFp8 ? 4 : 2;
#pragma unroll
    for (uint32_t read = 0; read < Form::kSteps / kStepsPerRead; ++read) {
      const uint4 low = read_unit(keys_, r, read * 4 + c), high = read_unit(keys_, r + 8, read * 4 + c);
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
          multiply<Form>(scores_[group], key, query[group][read * kStepsPerRead + j]);
      }
    }
  }

  __device__ __forceinline__ void scale(const Rows<Form>& rows, float soft_cap) {
    constexpr float kLog2E = 1.4426950408889634f;
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        float& score = scores_[group][j];
        score *= rows.factor[group][j % 2];
        if (soft_cap != 0) score = tanhf(score / soft_cap) * (soft_cap * kLog2E);
      }
    }
  }

  __device__ __forceinline__ void hide(uint32_t begin) {
    const uint32_t* const firsts = shared_.row_first[threadIdx.x / kLanes];
    const uint32_t* const ends = shared_.row_end[threadIdx.x / kLanes];
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t token = begin + threadIdx.x % kLanes / 4 + j / 2 * 8;
        const uint32_t row = group * 8 + threadIdx.x % 4 * 2 + j % 2;
        if (token < firsts[row] || token >= ends[row]) scores_[group][j] = -INFINITY;
      }
    }
  }

  // scores_ become weights relative to the maximum so far.
  __device__ __forceinline__ void weigh(Partial<Form>& partial) {
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group) {
      float(&scores)[4] = scores_[group];
      float(&maxima)[2] = partial.maximum[group];
      const bool is_larger =
          fmaxf(scores[0], scores[2]) > maxima[0] || fmaxf(scores[1], scores[3]) > maxima[1];
      if (__any_sync(~0u, is_larger)) raise(partial, group);
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const float base = maxima[i] == -INFINITY ? 0 : maxima[i];
        scores[i] = instruction::power_of_two(scores[i] - base);
        scores[2 + i] = instruction::power_of_two(scores[2 + i] - base);
        partial.total[group][i] += scores[i] + scores[2 + i];
      }
    }
  }

  __device__ __forceinline__ void raise(Partial<Form>& partial, uint32_t group) {
    float factor[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      float maximum = fmaxf(scores_[group][i], scores_[group][2 + i]);
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

  // A word of each of four tokens' values: two elements of bfloat16, or four of FP8.
  __device__ __forceinline__ void add_word(Partial<Form>& partial, const uint2 (&weights)[Form::kRowGroups],
                                           uint32_t tile, uint32_t v0, uint32_t v1, uint32_t v2,
                                           uint32_t v3) {
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
  __device__ __forceinline__ void add_elements(Partial<Form>& partial,
                                               const uint2 (&weights)[Form::kRowGroups], uint32_t tile,
                                               const uint4& values) {
#pragma unroll
    for (uint32_t group = 0; group < Form::kRowGroups; ++group)
      multiply<Form>(partial.sums[group][tile], values, weights[group]);
  }

  static constexpr uint32_t kFirstValue = Form::kParts == 2 ? 0 : Form::kRowUnits / 2;

  static __device__ __forceinline__ uint4 read_unit(const uint8_t* memory, uint32_t row, uint32_t unit) {
    const uint32_t place = row * Form::kPartRowBytes + Ring<Form>::unit_place(row, unit) * 16;
    return *reinterpret_cast<const uint4*>(memory + place);
  }
  __device__ __forceinline__ void read_value(uint32_t row, uint32_t part, uint32_t (&words)[4]) const {
    if constexpr (Form::kLoad == 16) {
      const uint4 unit = read_unit(values, row, kFirstValue + part);
      words[0] = unit.x, words[1] = unit.y, words[2] = unit.z, words[3] = unit.w;
    } else {
      const uint32_t unit = Ring<Form>::unit_place(row, kFirstValue + part / 2);
      const uint8_t* const place = values + row * Form::kPartRowBytes + unit * 16 + part % 2 * 8;
      const uint2 pair = *reinterpret_cast<const uint2*>(place);
      words[0] = pair.x, words[1] = pair.y;
    }
  }

  const Shared<Form>& shared_;
  const uint8_t* const keys_;
  float scores_[Form::kRowGroups][4];
};

}  // namespace nibble::attention
