// What the warpgroup kernels share: pieces of a tile, and the way of sums to the output.
#pragma once

#include <type_traits>

#include "nibble/mma_operand.cuh"
#include "nibble/warpgroup_instructions.cuh"
#include "nvfp4_linear/ring.cuh"
#include "nvfp4_linear/warpgroup_form.h"

namespace nibble::warpgroup {

using decode::Fragment;
using decode::kGroup;
using decode::kPieces;
using instruction::SharedPlace;

constexpr uint32_t kSteps = kChunk / 16;  // products of a chunk
static_assert(kChunk == decode::kChunk && kTileBytes == decode::kTileBytes);

struct Output {
  const float* column_scale;
  const void* bias;
  const void* residual;  // as `out`
  void* out;
  float global_scale;
  uint32_t outputs;
  bool silu_mul;
  bool ordered;  // of warpgroup.cuh: the result is the x of a next product, in order
  NormAfter norm;  // of forms with a norm after the product
};

__device__ __forceinline__ uint32_t word(const uint4& words, uint32_t i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// A lane's part of a tile in shared memory.
__device__ __forceinline__ Fragment load_tile(SharedPlace codes, SharedPlace scales) {
  const uint32_t lane = threadIdx.x % kLanes;
  return {instruction::load_shared(codes + lane * 16),
          instruction::load_shared(codes + kCodeBytes / 2 + lane * 16),
          instruction::load_shared_word(scales + lane * 4)};
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ uint32_t pair_of(__nv_bfloat16, float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pair_of(__half, float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class T>
__device__ __forceinline__ float element(uint32_t pair, uint32_t i) {
  return to_float(reinterpret_cast<const T*>(&pair)[i]);
}
template <class T>
__device__ __forceinline__ const uint32_t* pair_at(const void* matrix, size_t place) {
  return reinterpret_cast<const uint32_t*>(static_cast<const T*>(matrix) + place);
}

// Column scales and biases of a lane's rows of a group, in the upper and in the lower half.
struct Factors {
  float upper, lower, upper_bias, lower_bias;
};
template <class T>
__device__ __forceinline__ Factors factors_of(const Output& to, uint32_t group) {
  const uint32_t half = to.outputs / 2, upper = group * kGroup + threadIdx.x % kLanes / 4;
  const bool is_there = upper < half;
  const auto factor = [&](uint32_t row) {
    return to.column_scale && is_there ? __ldg(to.column_scale + row) : 1.0f;
  };
  const auto bias = [&](uint32_t row) {
    return to.bias && is_there ? to_float(__ldg(static_cast<const T*>(to.bias) + row)) : 0.0f;
  };
  return {factor(upper), factor(upper + half), bias(upper), bias(upper + half)};
}

// Of 8 tokens and a group, a lane writes two neighbouring rows of one token, in each half.
__device__ __forceinline__ uint32_t token_of(uint32_t first_token) {
  return first_token + threadIdx.x % kLanes / 4;
}
__device__ __forceinline__ uint32_t first_row_of(uint32_t group) {
  return group * kGroup + threadIdx.x % 4 * 2;
}

// Tile: tokens of a tile of an ordered result.
struct Target {
  size_t upper, lower;
  bool is_there;
};
template <uint32_t Tile>
__device__ __forceinline__ Target target_of(const Output& to, uint32_t tokens, uint32_t group,
                                            uint32_t first_token) {
  const uint32_t half = to.outputs / 2, token = token_of(first_token), row = first_row_of(group);
  const uint32_t columns = to.silu_mul ? half : to.outputs;
  const bool is_there = token < tokens && row < half;
  if constexpr (Tile != 0) {
    if (to.ordered) {
      const auto place = [&](uint32_t column) { return pair_place(token, column, Tile, columns / kChunk); };
      return {place(row), place(row + half), is_there};
    }
  }
  const size_t upper = size_t{token} * columns + row;
  return {upper, upper + half, is_there};
}
// Of 8 tokens and a group, what a lane adds to its pairs, and the weights of a norm after them.
struct Addends {
  uint2 residual, norm_weight;
};
template <class T, Norm Beside = Norm::none>
__device__ __forceinline__ Addends addends_of(const Output& to, uint32_t tokens, uint32_t group,
                                              uint32_t first_token) {
  Addends addends{};
  if constexpr (Beside == Norm::before) return addends;
  const Target at = target_of<0>(to, tokens, group, first_token);
  if (!at.is_there) return addends;
  if (to.residual) {
    addends.residual.x = __ldcg(pair_at<T>(to.residual, at.upper));
    if (!to.silu_mul) addends.residual.y = __ldcg(pair_at<T>(to.residual, at.lower));
  }
  if constexpr (Beside == Norm::after) {
    const uint32_t row = first_row_of(group);
    addends.norm_weight.x = __ldg(pair_at<T>(to.norm.weight, row));
    addends.norm_weight.y = __ldg(pair_at<T>(to.norm.weight, row + to.outputs / 2));
  }
  return addends;
}

// A pair of a row of the norm's input, times the norm's weights, in order. The sum of the pair's squares.
template <class T>
__device__ __forceinline__ float write_scaled(const Output& to, uint32_t token, uint32_t row, uint32_t pair,
                                              uint32_t weight) {
  const float a = element<T>(pair, 0), b = element<T>(pair, 1);
  *const_cast<uint32_t*>(pair_at<T>(to.norm.scaled, pair_place(token, row, to.norm.tile, to.outputs / kChunk))) =
      pair_of(T(), a * element<T>(weight, 0), b * element<T>(weight, 1));
  return fmaf(a, a, b * b);
}

// Writes sums of 8 tokens and of a group. A lane has tokens 2 c and 2 c + 1 of its row of the upper half,
// then of the lower half's. Ordered results take no residual. Returns the sum of squares of what the lane wrote, of
// one token, where a norm comes next.
template <class T, class Operand, uint32_t Tile = 0, Norm Beside = Norm::none>
__device__ __forceinline__ float write(const Output& to, uint32_t tokens, uint32_t group, uint32_t first_token,
                                       const float4& sums, const Factors& factors, const Addends& addends) {
  const auto finished = [&](float sum, float column_scale, float bias) {
    sum *= Operand::kUnit;
    sum *= to.global_scale;
    return sum * column_scale + bias;
  };
  const float y0 = finished(sums.x, factors.upper, factors.upper_bias),
              y1 = finished(sums.y, factors.upper, factors.upper_bias),
              z0 = finished(sums.z, factors.lower, factors.lower_bias),
              z1 = finished(sums.w, factors.lower, factors.lower_bias);
  const Target at = target_of<Tile>(to, tokens, group, first_token);
  // A pair to write, with the residual, rounded once.
  const auto pair_with = [&](float a, float b, uint32_t residual) {
    if (Beside != Norm::before && to.residual) {
      const uint32_t of_sums = instruction::transpose_pairs(residual);
      a += element<T>(of_sums, 0);
      b += element<T>(of_sums, 1);
    }
    return instruction::transpose_pairs(pair_of(T(), a, b));
  };
  const auto store = [&](size_t place, uint32_t pair) {
    *const_cast<uint32_t*>(pair_at<T>(to.out, place)) = pair;
  };
  if (Beside != Norm::after && to.silu_mul) {
    const auto product = [](float y, float z) { return __fdividef(y, 1.0f + __expf(-y)) * z; };
    const uint32_t pair = pair_with(product(y0, z0), product(y1, z1), addends.residual.x);
    if (at.is_there) store(at.upper, pair);
    return 0.0f;
  }
  const uint32_t upper = pair_with(y0, y1, addends.residual.x), lower = pair_with(z0, z1, addends.residual.y);
  if (!at.is_there) return 0.0f;
  store(at.upper, upper);
  store(at.lower, lower);
  if constexpr (Beside == Norm::after) {
    const uint32_t token = token_of(first_token), row = first_row_of(group);
    return write_scaled<T>(to, token, row, upper, addends.norm_weight.x) +
           write_scaled<T>(to, token, row + to.outputs / 2, lower, addends.norm_weight.y);
  }
  return 0.0f;
}

// Writes sums(i) of `Count` times 8 tokens and of a group; after(i, what write returned). The compiler keeps loads
// and stores in order, so residuals are loaded before anything is written, those of several i at a time.
template <class T, class Operand, uint32_t Count, uint32_t Tile = 0, Norm Beside = Norm::none, class F,
          class After>
__device__ __forceinline__ void write_all(const Output& to, uint32_t tokens, uint32_t group,
                                          uint32_t first_token, F&& sums, After&& after) {
  constexpr uint32_t kAtOnce = Count < 8 ? Count : 8;
  static_assert(Count % kAtOnce == 0);
  const Factors factors = factors_of<T>(to, group);
#pragma unroll
  for (uint32_t first = 0; first < Count; first += kAtOnce) {
    Addends addends[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      addends[i] = addends_of<T, Beside>(to, tokens, group, first_token + (first + i) * kTokenGroup);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      after(first + i, write<T, Operand, Tile, Beside>(to, tokens, group, first_token + (first + i) * kTokenGroup,
                                                       sums(first + i), factors, addends[i]));
    }
  }
}

}  // namespace nibble::warpgroup
