// Up to 16 rows of activations times an NVFP4 weight of which two in four neighbours are zero: 7/9 of the dense
// weight's bytes. Layouts and order of work: docs/kernels/blackwell.md.
//
// A thread block has a group of 16 rows. Its warps take 128 columns in turn, decode the stored codes as the
// dense kernel does, and multiply with the sparse form of the tensor cores' f16 and bfloat16 products. Their
// sums meet in shared memory, in their order. x comes in phases of columns.
#pragma once

#include <type_traits>

#include "nibble/mma_operand.cuh"

namespace nibble::sparse {

constexpr uint32_t kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;
constexpr uint32_t kGroup = 8;     // rows of the weight's upper half; as many of the lower half join
constexpr uint32_t kChunk = 128;   // columns
constexpr uint32_t kProducts = 4;  // of a chunk, 32 columns each
constexpr uint32_t kTokenGroup = 8;

struct Problem {
  const uint32_t* x;       // [tokens, columns / 2]: pairs
  const uint4* codes;      // [groups, chunks, 32]: weight.py
  const uint2* places;     // [groups, chunks, 32]
  const uint32_t* scales;  // [groups, chunks, 32]
  const float* column_scale;
  const void* bias;
  void* out;
  float global_scale;
  uint32_t tokens, outputs, columns, chunks;
  bool silu_mul;
};

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

template <class Operand, uint32_t TokenGroups>
struct Multiplier {
  using T = typename Operand::Element;
  static constexpr uint32_t kTokens = TokenGroups * kTokenGroup;
  static constexpr uint32_t kPhase = 24 / TokenGroups;                     // chunks whose x is there
  static constexpr uint32_t kXChunk = kProducts * kTokens * 4;             // 16 bytes each
  static constexpr uint32_t kSums = TokenGroups * 4;                       // of a lane
  static constexpr uint32_t kSharedBytes = kPhase * kXChunk * sizeof(uint4);  // of x, then of sums
  static_assert(kWarps * kSums * kLanes * sizeof(float) <= kSharedBytes);
  using Sums = float[TokenGroups][4];

  // 32 columns of a row of the upper half and of one of the lower: 16 codes each.
  struct Tile {
    uint4 codes;
    uint2 places;
    uint32_t scales;
  };

  const Problem& p;
  uint4* const shared;
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, group = blockIdx.x;
  const uint32_t half = p.outputs / 2;

  __device__ __forceinline__ Tile load(uint32_t chunk) const {
    const size_t place = (size_t{group} * p.chunks + chunk) * kLanes + lane;
    return {instruction::load_once(p.codes + place), __ldg(p.places + place), __ldg(p.scales + place)};
  }

  // x of a phase: [chunks, products, tokens, 4], each what a lane needs for a product. A product's columns are
  // 8 of each of the weight's four lanes: this has pairs of the first two lanes' and of the others', from the
  // first four columns and from the next.
  __device__ __forceinline__ void stage_x(uint32_t first_chunk) const {
    const uint32_t count = min(kPhase, p.chunks - first_chunk) * kXChunk;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t c = i % 4, token = i / 4 % kTokens, product = i / (4 * kTokens) % kProducts;
      const uint32_t column = (first_chunk + i / kXChunk) * kChunk + c / 2 * 32 + product * 8 + c % 2 * 2;
      const auto pair = [&](uint32_t further) {
        const bool is_there = token < p.tokens && column + further < p.columns;
        return is_there ? __ldg(p.x + (size_t{token} * p.columns + column + further) / 2) : 0;
      };
      shared[i] = make_uint4(pair(0), pair(64), pair(4), pair(68));
    }
  }

  __device__ __forceinline__ void multiply(const Tile& tile, const uint4* x, Sums& sums) const {
    uint32_t scales[4];
    Operand::scales(tile.scales, scales);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {  // a block of each row
      uint32_t upper[4], lower[4];
      Operand::decode(j ? tile.codes.y : tile.codes.x, upper);
      Operand::decode(j ? tile.codes.w : tile.codes.z, lower);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        upper[i] = Operand::multiply(upper[i], scales[j]);
        lower[i] = Operand::multiply(lower[i], scales[2 + j]);
      }
      const uint32_t places = j ? tile.places.y : tile.places.x;
      const uint32_t first[4] = {upper[0], lower[0], upper[1], lower[1]};
      const uint32_t second[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
      for (uint32_t i = 0; i < TokenGroups; ++i) {
        const uint4* const own = x + (2 * j * kTokens + i * kTokenGroup) * 4 + lane;
        mma<0>(sums[i], first, own[0], places);
        mma<1>(sums[i], second, own[kTokens * 4], places);
      }
    }
  }

  template <uint32_t Lanes>
  static __device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], const uint4& b,
                                             uint32_t places) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      instruction::mma_sparse_bfloats<Lanes>(sum, a, b, places);
    } else {
      instruction::mma_sparse_halves<Lanes>(sum, a, b, places);
    }
  }

  __device__ __forceinline__ float finished(float sum, uint32_t output) const {
    sum *= Operand::kUnit;
    sum *= p.global_scale;
    if (p.column_scale) sum *= __ldg(p.column_scale + output);
    if (p.bias) sum += to_float(static_cast<const T*>(p.bias)[output]);
    return sum;
  }

  // A lane had rows (row, row + N / 2) of tokens 2 c and 2 c + 1; an item is one of those pairs.
  __device__ __forceinline__ void finish() const {
    const float* const sums = reinterpret_cast<const float*>(shared);
    T* const out = static_cast<T*>(p.out);
    for (uint32_t item = threadIdx.x; item < kGroup * p.tokens; item += kThreads) {
      const uint32_t row = item % kGroup, token = item / kGroup, upper = group * kGroup + row;
      if (upper >= half) continue;
      const float* place =
          sums + (token / kTokenGroup * 4 + token % 2) * kLanes + row * 4 + token % kTokenGroup / 2;
      float y = 0.0f, z = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kWarps; ++i, place += kSums * kLanes) {
        y += place[0];
        z += place[2 * kLanes];
      }
      y = finished(y, upper);
      z = finished(z, upper + half);
      if (p.silu_mul) {
        assign(out[size_t{token} * half + upper], __fdividef(y, 1.0f + __expf(-y)) * z);
      } else {
        assign(out[size_t{token} * p.outputs + upper], y);
        assign(out[size_t{token} * p.outputs + upper + half], z);
      }
    }
  }

  // The next tile is under way while one is multiplied, also over the end of a phase.
  __device__ __forceinline__ void run() const {
    Sums sums = {};
    Tile now = {}, next = {};
    uint32_t chunk = warp;
    if (chunk < p.chunks) now = load(chunk);
    for (uint32_t first_chunk = 0; first_chunk < p.chunks; first_chunk += kPhase) {
      if (first_chunk != 0) __syncthreads();  // x is over
      stage_x(first_chunk);
      __syncthreads();
      for (; chunk < min(first_chunk + kPhase, p.chunks); chunk += kWarps) {
        if (chunk + kWarps < p.chunks) next = load(chunk + kWarps);
        multiply(now, shared + (chunk - first_chunk) * kXChunk, sums);
        now = next;
      }
    }
    __syncthreads();
    float* const own = reinterpret_cast<float*>(shared) + warp * (kSums * kLanes) + lane;
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) own[i * kLanes] = sums[i / 4][i % 4];
    __syncthreads();
    finish();
  }
};

}  // namespace nibble::sparse
