// A warp's products with a tile of keys and values.
#pragma once

#include "decode_attention/work.cuh"

namespace nibble::attention {

__device__ __forceinline__ uint32_t pair_of(float low, float high, bool is_half) {
  if (is_half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class Form>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (Form::kIsFp8) {
    instruction::mma_halves(sum, a.x, a.y, a.z, a.w, b0, b1);
  } else {
    instruction::mma_bfloats(sum, a.x, a.y, a.z, a.w, b0, b1);
  }
}

// The first of four neighbouring elements of the head dim that lane 4 r + c has in a step. A key's 16 bytes
// are then those of one read, and their order in the sum is free.
template <class Form>
__device__ __forceinline__ uint32_t element_of(uint32_t step, uint32_t c) {
  constexpr uint32_t kStepsPerRead = Form::kIsFp8 ? 4 : 2, kPerRead = 16 / Form::kElement;
  return step / kStepsPerRead * 4 * kPerRead + c * kPerRead + step % kStepsPerRead * 4;
}

// What a warp has of a chunk's result. Of the rows r and r + 8 of lane 4 r + c.
template <class Form>
struct Partial {
  float sums[Form::kColumns][4];
  float maximum[2], total[2];  // base 2; `total` is of this lane's tokens alone
};

template <class Form>
struct Rows {
  float factor[2];              // of a sum of products: the scale, in base 2 unless scores are capped
  uint32_t first[2], end[2];    // tokens that the row sees
  uint32_t all_first, all_end;  // that all rows see
};

template <class Form>
class Tile {
 public:
  static constexpr uint32_t kKeys = Form::kTile / 8;

  __device__ __forceinline__ Tile(const uint8_t* memory, const uint32_t* query)
      : memory_(memory), query_(query) {}

  __device__ __forceinline__ void add(Partial<Form>& partial, const Rows<Form>& rows, float soft_cap,
                                      uint32_t begin, const uint4 (&query)[Form::kSteps]) {
    score(query);
    scale(rows, soft_cap);
    if (begin < rows.all_first || begin + Form::kTile > rows.all_end) hide(rows, begin);
    weigh(partial);
    add_values(partial);
  }

 private:
  // scores_ = queries x keys.
  __device__ __forceinline__ void score(const uint4 (&query)[Form::kSteps]) {
    const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) scores_[i][j] = 0;
    }
    constexpr uint32_t kStepsPerRead = Form::kIsFp8 ? 4 : 2;
#pragma unroll
    for (uint32_t read = 0; read < Form::kSteps / kStepsPerRead; ++read) {
#pragma unroll
      for (uint32_t i = 0; i < kKeys; ++i) {
        const uint4 key = read_unit(i * 8 + r, read * 4 + c);
        const uint32_t words[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
        for (uint32_t j = 0; j < kStepsPerRead; ++j) {
          const uint32_t step = read * kStepsPerRead + j;
          const uint4 a = Form::kQueryInRegisters ? query[step] : query_of(step);
          if constexpr (Form::kIsFp8) {
            multiply<Form>(scores_[i], a, instruction::e4m3_pair(words[j]),
                           instruction::e4m3_pair(words[j] >> 16));
          } else {
            multiply<Form>(scores_[i], a, words[2 * j], words[2 * j + 1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void scale(const Rows<Form>& rows, float soft_cap) {
    constexpr float kLog2E = 1.4426950408889634f;
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        scores_[i][j] *= rows.factor[j / 2];
        if (soft_cap != 0) scores_[i][j] = tanhf(scores_[i][j] / soft_cap) * (soft_cap * kLog2E);
      }
    }
  }

  __device__ __forceinline__ void hide(const Rows<Form>& rows, uint32_t begin) {
#pragma unroll
    for (uint32_t i = 0; i < kKeys; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t token = begin + i * 8 + threadIdx.x % 4 * 2 + j % 2;
        if (token < rows.first[j / 2] || token >= rows.end[j / 2]) scores_[i][j] = -INFINITY;
      }
    }
  }

  // scores_ become weights relative to the maximum so far.
  __device__ __forceinline__ void weigh(Partial<Form>& partial) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float maximum = scores_[0][2 * half];
#pragma unroll
      for (uint32_t i = 0; i < kKeys; ++i) {
        maximum = fmaxf(maximum, fmaxf(scores_[i][2 * half], scores_[i][2 * half + 1]));
      }
      maximum = fmaxf(maximum, shuffled(maximum, 1));
      maximum = fmaxf(maximum, shuffled(maximum, 2));
      maximum = fmaxf(maximum, partial.maximum[half]);
      const float base = maximum == -INFINITY ? 0 : maximum;
      const float factor = instruction::power_of_two(partial.maximum[half] - base);
      partial.maximum[half] = maximum;
      float total = 0;
#pragma unroll
      for (uint32_t i = 0; i < kKeys; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          float& score = scores_[i][2 * half + j];
          score = instruction::power_of_two(score - base);
          total += score;
        }
      }
      partial.total[half] = fmaf(partial.total[half], factor, total);
      if (factor != 1) {
#pragma unroll
        for (uint32_t column = 0; column < Form::kColumns; ++column) {
          partial.sums[column][2 * half] *= factor;
          partial.sums[column][2 * half + 1] *= factor;
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void add_values(Partial<Form>& partial) {
    const uint32_t lane = threadIdx.x % kLanes, r = lane / 4, c = lane % 4;
#pragma unroll
    for (uint32_t group = 0; group < kKeys / 2; ++group) {
      const float (&low)[4] = scores_[2 * group], (&high)[4] = scores_[2 * group + 1];
      const uint4 weights = {pair_of(low[0], low[1], Form::kIsFp8), pair_of(low[2], low[3], Form::kIsFp8),
                             pair_of(high[0], high[1], Form::kIsFp8),
                             pair_of(high[2], high[3], Form::kIsFp8)};
      const uint32_t token = group * 16 + 2 * c;
#pragma unroll
      for (uint32_t load = 0; load < Form::kLoads; ++load) {
        uint32_t words[4][4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) read_value(token + i / 2 * 8 + i % 2, load * 8 + r, words[i]);
#pragma unroll
        for (uint32_t word = 0; word < Form::kLoad / 4; ++word) {
          add_word(&partial.sums[load * Form::kPerLoad + word * (4 / Form::kElement)], weights,
                   words[0][word], words[1][word], words[2][word], words[3][word]);
        }
      }
    }
  }

  // A word of each of four tokens' values: two columns of bfloat16, or four of FP8.
  __device__ __forceinline__ void add_word(float (*sums)[4], const uint4& weights, uint32_t v0, uint32_t v1,
                                           uint32_t v2, uint32_t v3) {
    if constexpr (Form::kIsFp8) {
      const uint32_t low01 = __byte_perm(v0, v1, 0x5140), high01 = __byte_perm(v0, v1, 0x7362);
      const uint32_t low23 = __byte_perm(v2, v3, 0x5140), high23 = __byte_perm(v2, v3, 0x7362);
      multiply<Form>(sums[0], weights, instruction::e4m3_pair(low01), instruction::e4m3_pair(low23));
      multiply<Form>(sums[1], weights, instruction::e4m3_pair(low01 >> 16),
                     instruction::e4m3_pair(low23 >> 16));
      multiply<Form>(sums[2], weights, instruction::e4m3_pair(high01), instruction::e4m3_pair(high23));
      multiply<Form>(sums[3], weights, instruction::e4m3_pair(high01 >> 16),
                     instruction::e4m3_pair(high23 >> 16));
    } else {
      multiply<Form>(sums[0], weights, __byte_perm(v0, v1, 0x5410), __byte_perm(v2, v3, 0x5410));
      multiply<Form>(sums[1], weights, __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x7632));
    }
  }

  __device__ __forceinline__ uint4 read_unit(uint32_t row, uint32_t unit) const {
    const uint8_t* const place = memory_ + row * Form::kRowBytes + Ring<Form>::unit_place(row, unit) * 16;
    return *reinterpret_cast<const uint4*>(place);
  }
  __device__ __forceinline__ void read_value(uint32_t row, uint32_t part, uint32_t (&words)[4]) const {
    if constexpr (Form::kLoad == 16) {
      const uint4 unit = read_unit(row, Form::kRowUnits / 2 + part);
      words[0] = unit.x, words[1] = unit.y, words[2] = unit.z, words[3] = unit.w;
    } else {
      const uint32_t unit = Ring<Form>::unit_place(row, Form::kRowUnits / 2 + part / 2);
      const uint8_t* const place = memory_ + row * Form::kRowBytes + unit * 16 + part % 2 * 8;
      const uint2 pair = *reinterpret_cast<const uint2*>(place);
      words[0] = pair.x, words[1] = pair.y;
    }
  }
  __device__ __forceinline__ uint4 query_of(uint32_t step) const {
    return reinterpret_cast<const uint4*>(query_)[step * kLanes + threadIdx.x % kLanes];
  }
  static __device__ __forceinline__ float shuffled(float x, uint32_t mask) {
    return __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(x), mask));
  }

  const uint8_t* const memory_;
  const uint32_t* const query_;
  float scores_[kKeys][4];
};

}  // namespace nibble::attention
