// The way of the activations to the decode kernel's warps: into shared memory, normalized and brought into
// float16's range where that is asked for.
#pragma once

#include <type_traits>

#include "nvfp4_linear/work.cuh"

namespace nibble::decode {

__device__ __forceinline__ uint32_t word(const uint4& words, uint32_t i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

template <class T>
__device__ __forceinline__ float element_of(uint32_t pair, uint32_t i) {
  return std::conditional_t<std::is_same_v<T, __half>, HalfOperand, BfloatOperand>::element(pair, i);
}
template <class T>
__device__ __forceinline__ float rounded(float x) {
  T value;
  assign(value, x);
  return to_float(value);
}
template <class T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  alignas(uint32_t) T values[2];
  assign(values[0], low);
  assign(values[1], high);
  return *reinterpret_cast<const uint32_t*>(values);
}

// The power of two that brings a row whose largest magnitude has these bits (as bfloat16) to [2^14, 2^15), as
// the exponent field of a float32; that of its inverse is 254 less it.
__device__ __forceinline__ uint32_t range_exponent(uint32_t largest) {
  return min(268 - (largest >> 7), 253u);
}

// Where tokens lie: one after the other, in x as in the output.
struct InOrder {
  static constexpr bool kHasNorm = true;
  // Weights may be read while the previous kernel runs, x may not.
  static __device__ __forceinline__ void before_x() {
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
  }
  __device__ __forceinline__ uint32_t input(uint32_t token) const { return token; }
  __device__ __forceinline__ uint32_t output(uint32_t token) const { return token; }
  __device__ __forceinline__ float weight(uint32_t) const { return 1.0f; }
};

template <class T, class Operand, class Form, class Rows>
struct Activations {
  static constexpr bool kConverts = !Operand::kAnyRange && std::is_same_v<T, __nv_bfloat16>;
  static constexpr uint32_t kRow = kChunk / 8;  // 16 bytes each of a row in a chunk

  const Problem& p;
  const Rows rows;
  uint32_t* const token_range;  // [tokens]: largest bits
  float* const norms;           // [tokens]
  uint4* const x;               // [chunks of the phase, tokens, place_of]
  float* const parts;           // [tokens, warps], while norms are found
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t chunk_size = Form::x_rows(p.tokens) * kRow;

  __device__ __forceinline__ Activations(const Problem& problem, const Rows& rows, void* shared, float* parts)
      : p(problem),
        rows(rows),
        token_range(static_cast<uint32_t*>(shared)),
        norms(reinterpret_cast<float*>(token_range + Form::kTokens)),
        x(reinterpret_cast<uint4*>(norms + Form::kTokens)),
        parts(parts) {}

  // Where a piece of a quarter of a chunk lies in a row of x. Neighbouring tokens have their pieces the other
  // way round, so that eight lanes read 128 different bytes of shared memory.
  static __device__ __forceinline__ uint32_t place_of(uint32_t token, uint32_t piece, uint32_t quarter) {
    return (piece ^ token % 2) * kQuarters + quarter;
  }

  // Calls f(place in shared memory, token, column) for 16 bytes of x after the other, those of a thread.
  // Eight lanes have 128 bytes of shared memory, the warp whole sectors of x.
  template <class F>
  __device__ __forceinline__ void for_x(const Round& round, F&& f) const {
    const uint32_t piece = lane / 8, odd = lane / 4 % 2, quarter = lane % kQuarters;
    const uint32_t units = (p.tokens + 1) / 2 * round.chunks;
#pragma unroll 1
    for (uint32_t unit = warp; unit < units; unit += Form::kWarps) {
      const uint32_t pair = quotient(unit, round.chunks), chunk = unit - pair * round.chunks;
      const uint32_t token = pair * 2 + odd,
                     column = (round.first_chunk + chunk) * kChunk + quarter * 32 + piece * 8;
      if (token < p.tokens)
        f(chunk * chunk_size + token * kRow + place_of(token, piece, quarter), token, column);
    }
  }

  // A round's columns of x, in the order in which lanes need them, zeros past the end of a row; `is_first`:
  // of a row.
  __device__ __forceinline__ void stage(const Round& round, bool is_first) const {
    const auto begin = instruction::shared_place(reinterpret_cast<uint8_t*>(x));
    for_x(round, [&](uint32_t place, uint32_t token, uint32_t column) {
      if (column < p.columns) {
        instruction::copy_once(begin + place * sizeof(uint4),
                               p.x + (size_t{rows.input(token)} * p.columns + column) / 8);
      } else {
        x[place] = make_uint4(0, 0, 0, 0);
      }
    });
    instruction::end_copies();
    instruction::wait_for_copies<0>();
    if constexpr (Rows::kHasNorm) {
      if (p.norm_weight) {
        if (is_first) find_norms(round.chunks == p.chunks);
        normalize(round);
      }
    }
    if constexpr (kConverts) bring_in_range(round);
    __syncthreads();
  }

  // RMSNorm of x, rounded before its weight and after, as vLLM does (0.32 ir/ops/layernorm.py).
  __device__ __forceinline__ void normalize(const Round& round) const {
    for_x(round, [&](uint32_t place, uint32_t token, uint32_t column) {
      if (column >= p.columns) return;
      const uint4 elements = x[place], weights = __ldg(p.norm_weight + column / 8);
      const auto pair = [&](uint32_t i) {
        const uint32_t both = word(elements, i), weight = word(weights, i);
        return pair_of<T>(rounded<T>(element_of<T>(both, 0) * norms[token]) * element_of<T>(weight, 0),
                          rounded<T>(element_of<T>(both, 1) * norms[token]) * element_of<T>(weight, 1));
      };
      x[place] = make_uint4(pair(0), pair(1), pair(2), pair(3));
    });
  }

  // The factor of each token, from its whole row: in shared memory where it is here, else as it lies in
  // memory.
  __device__ __forceinline__ void find_norms(bool is_here) const {
    const uint32_t piece = lane / 8, odd = lane / 4 % 2, quarter = lane % kQuarters;
    __syncthreads();
    for (uint32_t pair = 0; pair < (p.tokens + 1) / 2; ++pair) {
      const uint32_t token = min(pair * 2 + odd, p.tokens - 1);
      float squares = 0.0f;
      for (uint32_t chunk = warp; chunk < p.chunks; chunk += Form::kWarps) {
        const uint32_t column = chunk * kChunk + quarter * 32 + piece * 8;
        if (column >= p.columns) continue;
        const uint4 elements = is_here
                                   ? x[chunk * chunk_size + token * kRow + place_of(token, piece, quarter)]
                                   : __ldcg(p.x + (size_t{rows.input(token)} * p.columns + column) / 8);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          const float element = element_of<T>(word(elements, i / 2), i % 2);
          squares += element * element;
        }
      }
#pragma unroll
      for (uint32_t other = 1; other < kLanes; other *= other == 2 ? 4 : 2)  // of the same token
        squares += __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(squares), other));
      if (lane == odd * 4) parts[(pair * 2 + odd) * Form::kWarps + warp] = squares;
    }
    __syncthreads();
    if (threadIdx.x < p.tokens) {
      float squares = 0.0f;
      for (uint32_t i = 0; i < Form::kWarps; ++i) squares += parts[threadIdx.x * Form::kWarps + i];
      norms[threadIdx.x] = rsqrtf(squares / static_cast<float>(p.columns) + p.norm_epsilon);
    }
    __syncthreads();
  }

  // A thread's own elements, as float16.
  __device__ __forceinline__ void bring_in_range(const Round& round) const {
    for (uint32_t token = threadIdx.x; token < Form::kTokens; token += Form::kThreads) token_range[token] = 0;
    __syncthreads();
    for_x(round, [&](uint32_t place, uint32_t token, uint32_t) {
      uint32_t largest = 0;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t pair = word(x[place], i) & 0x7fff7fff;
        largest = max(largest, max(pair & 0xffff, pair >> 16));
      }
      if (largest > token_range[token]) atomicMax(token_range + token, largest);
    });
    __syncthreads();
    for_x(round, [&](uint32_t place, uint32_t token, uint32_t) {
      x[place] = in_range(x[place], token_range[token]);
    });
  }

  // bfloat16 as float16, times the row's power of two.
  static __device__ __forceinline__ uint4 in_range(const uint4& elements, uint32_t largest) {
    const float factor = __uint_as_float(range_exponent(largest) << 23);
    const auto convert = [&](uint32_t pair) {
      const __half2 halves = __floats2half2_rn(__uint_as_float(pair << 16) * factor,
                                               __uint_as_float(pair & 0xffff0000) * factor);
      return *reinterpret_cast<const uint32_t*>(&halves);
    };
    return make_uint4(convert(elements.x), convert(elements.y), convert(elements.z), convert(elements.w));
  }

  // What undoes a token's power of two.
  __device__ __forceinline__ float undo(uint32_t token) const {
    return __uint_as_float(254 - range_exponent(token_range[token]) << 23);
  }
};

}  // namespace nibble::decode
