// Few rows of E4M3 activations times an E4M3 weight as the checkpoint has it, at the speed at which the weight
// can be read. Layouts and order of work: docs/kernels/blackwell.md.
//
// A thread block has 32 rows of the weight. Its warps take 128 columns in turn; lanes load 16 bytes of a row
// and use them as columns of a product in another order, which a sum does not see. Sums of 128 columns are
// added in float32, so that no accumulator of fewer bits has more. Warps' sums meet in shared memory, in their
// order.
#pragma once

#include <type_traits>

#include "nibble/tensor_core.cuh"

namespace nibble::fp8 {

constexpr uint32_t kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;
constexpr uint32_t kRows = 32, kGroups = 2;  // of the weight: two products of 16 rows
constexpr uint32_t kChunk = 128;             // columns; also of a block of scales, and its rows
constexpr uint32_t kTokenGroup = 8;

struct Problem {
  const uint8_t *x, *weight;  // [tokens, columns], [outputs, columns]
  // Of a tensor, or one for each token and each output; or of blocks: [tokens, chunks], [outputs / 128, chunks].
  const float *x_scale, *weight_scale;
  const void* bias;
  void* out;
  uint32_t tokens, outputs, columns, chunks;
  bool x_has_one_scale, weight_has_one_scale;
};

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

template <class T, uint32_t TokenGroups, bool Blockwise>
struct Multiplier {
  static constexpr uint32_t kTokens = TokenGroups * kTokenGroup;
  static constexpr uint32_t kSums = kGroups * TokenGroups * 4;  // of a lane
  static constexpr uint32_t kSharedBytes = kWarps * kSums * kLanes * sizeof(float);
  using Sums = float[kGroups][TokenGroups][4];

  // 64 columns a piece: 16 bytes of a lane's rows q and q + 8 of each group.
  struct Weights {
    uint4 rows[kGroups][2][2];  // [group][half][piece]
  };

  const Problem& p;
  float* const shared;  // [warps, sums, lanes]
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t first_row = blockIdx.x * kRows;

  static __device__ __forceinline__ uint32_t word(const uint4& words, uint32_t i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
  __device__ __forceinline__ uint32_t column(uint32_t chunk, uint32_t piece) const {
    return chunk * kChunk + piece * 64 + lane % 4 * 16;
  }

  // Past the last row, the last one: nothing looks at its sums. Past the last column, zeros.
  __device__ __forceinline__ void load(uint32_t chunk, Weights& to) const {
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = min(first_row + group * 16 + half * 8 + lane / 4, p.outputs - 1);
#pragma unroll
        for (uint32_t piece = 0; piece < 2; ++piece) {
          uint4& words = to.rows[group][half][piece];
          words = make_uint4(0, 0, 0, 0);
          if (column(chunk, piece) < p.columns)
            words = instruction::load_once(p.weight + size_t{row} * p.columns + column(chunk, piece));
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(uint32_t chunk, const Weights& weights, Sums& sums) const {
#pragma unroll
    for (uint32_t i = 0; i < TokenGroups; ++i) {
      const uint32_t token = min(i * kTokenGroup + lane / 4, p.tokens - 1);
      float part[kGroups][4] = {};
#pragma unroll
      for (uint32_t piece = 0; piece < 2; ++piece) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (column(chunk, piece) < p.columns)
          x = __ldg(reinterpret_cast<const uint4*>(p.x + size_t{token} * p.columns + column(chunk, piece)));
#pragma unroll
        for (uint32_t group = 0; group < kGroups; ++group) {
          const uint4 &upper = weights.rows[group][0][piece], &lower = weights.rows[group][1][piece];
          instruction::mma_e4m3(part[group], upper.x, lower.x, upper.y, lower.y, x.x, x.y);
          instruction::mma_e4m3(part[group], upper.z, lower.z, upper.w, lower.w, x.z, x.w);
        }
      }
      add(chunk, i, part, sums);
    }
  }

  __device__ __forceinline__ void add(uint32_t chunk, uint32_t i, const float (&part)[kGroups][4],
                                      Sums& sums) const {
    float factors[2] = {1.0f, 1.0f};  // of a lane's two tokens
    if constexpr (Blockwise) {
      const float of_weight = __ldg(p.weight_scale + size_t{first_row / kChunk} * p.chunks + chunk);
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        const uint32_t token = min(i * kTokenGroup + lane % 4 * 2 + k, p.tokens - 1);
        factors[k] = __ldg(p.x_scale + size_t{token} * p.chunks + chunk) * of_weight;
      }
    }
#pragma unroll
    for (uint32_t group = 0; group < kGroups; ++group) {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) sums[group][i][k] += part[group][k] * factors[k % 2];
    }
  }

  __device__ __forceinline__ void finish() const {
    for (uint32_t item = threadIdx.x; item < kRows * p.tokens; item += kThreads) {
      const uint32_t row = item % kRows, token = item / kRows, output = first_row + row;
      if (output >= p.outputs) continue;
      const uint32_t number = (row / 16 * TokenGroups + token / kTokenGroup) * 4 + row % 16 / 8 * 2 + token % 2;
      const float* place = shared + number * kLanes + row % 8 * 4 + token % kTokenGroup / 2;
      float sum = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kWarps; ++i) sum += place[i * (kSums * kLanes)];
      if constexpr (!Blockwise) {
        sum *= __ldg(p.x_scale + (p.x_has_one_scale ? 0 : token));
        sum *= __ldg(p.weight_scale + (p.weight_has_one_scale ? 0 : output));
      }
      if (p.bias) sum += to_float(static_cast<const T*>(p.bias)[output]);
      assign(static_cast<T*>(p.out)[size_t{token} * p.outputs + output], sum);
    }
  }

  // The next columns of the weight are under way while these are multiplied.
  __device__ __forceinline__ void run() const {
    Sums sums = {};
    Weights now, next;
    if (warp < p.chunks) load(warp, now);
    for (uint32_t chunk = warp; chunk < p.chunks; chunk += kWarps) {
      if (chunk + kWarps < p.chunks) load(chunk + kWarps, next);
      multiply(chunk, now, sums);
      now = next;
    }
    float* const own = shared + warp * (kSums * kLanes) + lane;
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) own[i * kLanes] = sums[i / (4 * TokenGroups)][i / 4 % TokenGroups][i % 4];
    __syncthreads();
    finish();
  }
};

}  // namespace nibble::fp8
