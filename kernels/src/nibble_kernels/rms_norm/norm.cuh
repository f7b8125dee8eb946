// RMSNorm of a row by a thread block, which keeps it in registers. The result is a row, or in the order in which
// nvfp4_linear/warpgroup.cuh multiplies.
#pragma once

#include "nibble/vectors.cuh"
#include "nvfp4_linear/warpgroup_form.h"

namespace nibble::norm {

constexpr uint32_t kMaxThreads = 512, kMostVectors = 8;  // of 16 bytes, of a thread

struct Problem {
  const uint4 *x, *residual, *weight;  // the residual may be null, and `total` with it
  float epsilon;
  uint4 *out, *total;
  uint32_t vectors;  // of a row
  uint32_t tile;     // tokens of a tile of an ordered result, whose columns are whole chunks; 0: rows
};

// In every thread: the warp's sum in the order of a tree, then those of the warps in their order. `sums`: of each
// warp, in shared memory.
__device__ __forceinline__ float sum_of_block(float own, float* sums) {
#pragma unroll
  for (uint32_t mask = 1; mask < 32; mask *= 2) own += __shfl_xor_sync(~0u, own, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
  __syncthreads();
  float sum = 0.0f;
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
  return sum;
}

// Four lanes, 4 apart, have a row of four words each; afterwards a column each.
__device__ __forceinline__ uint4 transposed(uint4 w) {
  const bool is_low = threadIdx.x & 8, is_odd = threadIdx.x & 4;
  const uint32_t a = __shfl_xor_sync(~0u, is_low ? w.x : w.z, 8), b = __shfl_xor_sync(~0u, is_low ? w.y : w.w, 8);
  w = is_low ? make_uint4(a, b, w.z, w.w) : make_uint4(w.x, w.y, a, b);
  const uint32_t c = __shfl_xor_sync(~0u, is_odd ? w.x : w.y, 4), d = __shfl_xor_sync(~0u, is_odd ? w.z : w.w, 4);
  return is_odd ? make_uint4(c, w.y, d, w.w) : make_uint4(w.x, c, w.z, d);
}

// Where a lane's vector of an ordered result lies, after `transposed`.
__device__ __forceinline__ size_t ordered_place(const Problem& p, uint32_t token, uint32_t vector) {
  constexpr uint32_t kVectors = warpgroup::kChunkPieces, kQuarterVectors = kVectors / 4;
  const uint32_t piece = vector % kQuarterVectors * 4 + vector % kVectors / kQuarterVectors;
  return warpgroup::piece_place(token, vector / kVectors, piece, p.tile, p.vectors / kVectors);
}

// Vectors: at most, of a thread. With few, a block has room beside one of the product before.
template <class T, uint32_t Vectors, class WaitForX>
__device__ __forceinline__ void normalize_row(const Problem& p, float* sums, WaitForX&& wait_for_x) {
  const uint32_t token = blockIdx.x;
  const size_t begin = size_t{token} * p.vectors;
  Vector<T> first_scale{};
  if (threadIdx.x < p.vectors) first_scale.words = __ldg(p.weight + threadIdx.x);
  wait_for_x();
  float own[Vectors][8], squares = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < Vectors; ++i) {
    const uint32_t vector = i * blockDim.x + threadIdx.x;
    if (vector >= p.vectors) break;
    Vector<T> values, added, total;
    values.words = p.x[begin + vector];
    if (p.residual) added.words = p.residual[begin + vector];
#pragma unroll
    for (uint32_t k = 0; k < 8; ++k) {
      own[i][k] = to_float(values.elements[k]);
      if (p.residual) own[i][k] += to_float(added.elements[k]);
      assign(total.elements[k], own[i][k]);
      squares = fmaf(own[i][k], own[i][k], squares);
    }
    if (p.residual) p.total[begin + vector] = total.words;
  }
  const float mean = sum_of_block(squares, sums) / static_cast<float>(p.vectors * 8);
  const float factor = rsqrtf(mean + p.epsilon);
#pragma unroll
  for (uint32_t i = 0; i < Vectors; ++i) {
    if (i * blockDim.x >= p.vectors) break;  // of no thread of the block
    const uint32_t vector = i * blockDim.x + threadIdx.x;
    const bool is_there = vector < p.vectors;
    Vector<T> results{}, scale = first_scale;
    if (i != 0 && is_there) scale.words = __ldg(p.weight + vector);
#pragma unroll
    for (uint32_t k = 0; k < 8; ++k) {
      T normal;
      assign(normal, own[i][k] * factor);
      assign(results.elements[k], to_float(normal) * to_float(scale.elements[k]));
    }
    if (p.tile == 0) {
      if (is_there) p.out[begin + vector] = results.words;
    } else {
      const uint4 piece = transposed(results.words);
      if (is_there) p.out[ordered_place(p, token, vector)] = piece;
    }
  }
}

}  // namespace nibble::norm
