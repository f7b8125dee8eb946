// Activations in shared memory, in the order in which the decode kernel's lanes need them.
#pragma once

#include <type_traits>

#include "nvfp4_linear/work.cuh"

namespace nibble::decode {

__device__ __forceinline__ uint32_t word(const uint4& words, uint32_t i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The power of two that brings a row whose largest magnitude has these bits (as bfloat16) to [2^14, 2^15), as
// the exponent field of a float32; that of its inverse is 254 less it.
__device__ __forceinline__ uint32_t range_exponent(uint32_t largest) {
  return min(268 - (largest >> 7), 253u);
}

// The columns of a round.
template <class T, class Operand, class Form, class Rows>
struct StagedX {
  static constexpr bool kConverts = !Operand::kAnyRange && std::is_same_v<T, __nv_bfloat16>;
  static constexpr uint32_t kRow = kChunk / 8;  // 16 bytes each of a row of x in a chunk
  // Of a lane's loads of x. Sixteen warps have registers for few that are also converted.
  static constexpr uint32_t kAtOnce = kConverts && !Form::kSmall ? 4 : 8;

  const Problem& p;
  const Rows rows;
  uint32_t* const token_range;  // [tokens]: largest bits
  uint4* const elements;        // [chunks of the phase, tokens, place]
  const uint32_t chunk_size = Form::x_rows(p.tokens) * kRow;
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;

  // `shared`: a range for each token that the form takes, then the elements.
  __device__ __forceinline__ StagedX(const Problem& problem, const Rows& rows, uint32_t* shared)
      : p(problem),
        rows(rows),
        token_range(shared),
        elements(reinterpret_cast<uint4*>(shared + Form::kTokens)) {}

  // Where a piece of a quarter of a chunk lies in a row of x. Neighbouring tokens have their pieces the other
  // way round, so that eight lanes read 128 different bytes of shared memory.
  static __device__ __forceinline__ uint32_t place(uint32_t token, uint32_t piece, uint32_t quarter) {
    return (piece ^ token % 2) * kQuarters + quarter;
  }

  // Where a lane begins to read x, and how it goes on: the chunks of a token, a step apart. Eight lanes have
  // 128 bytes of shared memory, the warp whole sectors of x.
  struct Start {
    uint32_t pairs, step;           // of tokens that warps have at a time; chunks
    uint32_t token, chunk, column;  // of a chunk
  };
  __device__ __forceinline__ Start start() const {
    constexpr uint32_t kMostPairs = Form::kWarps & (~Form::kWarps + 1);  // a power of two that divides it
    uint32_t pairs = 1;
    while (pairs < kMostPairs && 2 * pairs < p.tokens) pairs *= 2;
    return {pairs, Form::kWarps / pairs, warp % pairs * 2 + lane / 4 % 2, warp / pairs,
            Form::Format::column(lane % kQuarters, lane / 8)};
  }

  // Calls f(place in shared memory, token, eight elements or zeros past the end of the row) for the columns
  // of a round, and loaded() while the first are loaded.
  template <class F, class G>
  __device__ __forceinline__ void for_x(const Round& round, const Start& start, F&& f, G&& loaded) const {
    bool is_first = true;
    uint32_t token = start.token, chunk = start.chunk;
    const uint32_t place = StagedX::place(start.token, lane / 8, lane % kQuarters);
#pragma unroll 1
    while (true) {
      const bool is_there = token < p.tokens;
      const uint32_t row = is_there ? rows.input(token) * p.columns : 0;
      uint4 loads[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t at = chunk + i * start.step;
        if (at >= round.chunks) break;
        const uint32_t column = (round.first_chunk + at) * kChunk + start.column;
        loads[i] = make_uint4(0, 0, 0, 0);
        if (is_there && column < p.columns) loads[i] = __ldcg(p.x + (row + column) / 8);
      }
      if (is_first) loaded();
      is_first = false;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t at = chunk + i * start.step;
        if (at >= round.chunks) break;
        if (is_there) f(at * chunk_size + token * kRow + place, token, loads[i]);
      }
      chunk += kAtOnce * start.step;
      if (chunk < round.chunks) continue;
      chunk = start.chunk;
      token += 2 * start.pairs;
      if (token >= p.tokens) return;
    }
  }

  // A round's columns of x, in the order in which lanes need them. loaded() runs while the first are loaded, stored()
  // before threads meet.
  template <class G, class H>
  __device__ __forceinline__ void stage(const Round& round, const Start& start, G&& loaded, H&& stored) const {
    if constexpr (kConverts) {
      find_ranges(round, start, loaded);
      for_x(round, start,
            [&](uint32_t place, uint32_t token, const uint4& of) {
              elements[place] = in_range(of, token_range[token]);
            },
            [] {});
    } else {
      for_x(round, start,
            [&](uint32_t place, uint32_t, const uint4& of) { elements[place] = Form::Format::arranged(of); },
            loaded);
    }
    stored();
    __syncthreads();
  }

  template <class G>
  __device__ __forceinline__ void find_ranges(const Round& round, const Start& start, G&& loaded) const {
    for (uint32_t token = threadIdx.x; token < Form::kTokens; token += Form::kThreads) token_range[token] = 0;
    __syncthreads();
    const auto raise = [&](uint32_t, uint32_t token, const uint4& elements) {
      uint32_t largest = 0;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t pair = word(elements, i) & 0x7fff7fff;
        largest = max(largest, max(pair & 0xffff, pair >> 16));
      }
      if (largest > token_range[token]) atomicMax(token_range + token, largest);
    };
    for_x(round, start, raise, loaded);
    __syncthreads();
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

  // Of a token's sums, what brings them back from its range.
  __device__ __forceinline__ float undo(uint32_t token) const {
    return kConverts ? __uint_as_float(254 - range_exponent(token_range[token]) << 23) : 1.0f;
  }
};

}  // namespace nibble::decode
