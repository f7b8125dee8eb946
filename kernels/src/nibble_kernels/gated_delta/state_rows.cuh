// The state of a head, spread over the threads of a block, and how a token changes it.
#pragma once

#include "gated_delta/arithmetic.cuh"

namespace nibble::gated_delta {

inline constexpr uint32_t kThreads = 256, kWarps = kThreads / kLanes;  // of a step's block

// One pass over the state has both of the sums that arithmetic.cuh's Gates speak of.
struct Change {
  float decay, beta;
  float k_factor, q_factor, products;  // products: k q, with both factors
  struct Row {
    float output, factor;  // factor: of the key, as it is in memory
  };
  // Of a row with these sums, of q and k as they are in memory.
  __device__ __forceinline__ Row of(float with_k, float with_q, float value) const {
    const float new_value = beta * (value - decay * with_k * k_factor);
    return {decay * with_q * q_factor + new_value * products, new_value * k_factor};
  }
  __device__ __forceinline__ float next(float x, float k, const Row& row) const {
    return __builtin_fmaf(row.factor, k, decay * x);
  }
};

// Query and key after the convolution, not normalized: numbers of bfloat16.
struct alignas(16) Inputs {
  float query[kHead], key[kHead];
  uint16_t bfloats[2][kHead];  // key and query
};

// Units are 16 bytes: first() is a thread's first one of a head, step(i) how far from it number i is. `memory`
// has a thread's units in shared memory, and `state` begins with its first one.
template <class State>
struct Rows;

// A warp has 16 rows, four lanes one of them and the one that is eight rows on. Both sums come from tensor
// cores: the state, the key and the query are bfloat16. Columns of the product have the key and the query in
// turns, so every lane gets the sums of its rows.
template <>
struct Rows<Bfloats> {
  static constexpr uint32_t kUnits = kHead * kHead * 2 / 16 / kThreads, kPairs = kUnits / 2;

  __device__ __forceinline__ static uint32_t row(uint32_t i) {
    return threadIdx.x / kLanes * 16 + i % 2 * 8 + threadIdx.x % kLanes / 4;
  }
  __device__ __forceinline__ static uint32_t unit(uint32_t pair) { return pair * 4 + threadIdx.x % 4; }
  __device__ __forceinline__ static uint32_t first() { return row(0) * (kHead / 8) + unit(0); }
  __device__ __forceinline__ static constexpr uint32_t step(uint32_t i) { return i % 2 * kHead + i / 2 * 4; }

  __device__ __forceinline__ static void update(const uint4* memory, const Inputs& in, const float* values,
                                                const Change& change, uint4* state, float* outputs) {
    const auto vector = [&](uint32_t which, uint32_t pair) {
      return reinterpret_cast<const uint4*>(in.bfloats[which])[unit(pair)];
    };
    uint4 units[kUnits];
    float sums[4] = {};  // of k and q with the first row, of k and q with the second
#pragma unroll
    for (uint32_t pair = 0; pair < kPairs; ++pair) {
      uint4 &a = units[2 * pair], &b = units[2 * pair + 1];
      a = memory[2 * pair * kThreads], b = memory[(2 * pair + 1) * kThreads];
      const uint4 x = vector(threadIdx.x / 4 % 2, pair);
      instruction::mma_bfloats(sums, a.x, b.x, a.y, b.y, x.x, x.y);
      instruction::mma_bfloats(sums, a.z, b.z, a.w, b.w, x.z, x.w);
    }
    const Change::Row rows[2] = {change.of(sums[0], sums[1], values[row(0)]),
                                 change.of(sums[2], sums[3], values[row(1)])};
    if (threadIdx.x % 4 < 2) {
      const uint32_t i = threadIdx.x % 2;
      outputs[row(i)] = rounded(i == 0 ? rows[0].output : rows[1].output);
    }
#pragma unroll
    for (uint32_t pair = 0; pair < kPairs; ++pair) {
      const Eight k = floats_of(vector(0, pair));
#pragma unroll
      for (uint32_t i = 2 * pair; i < 2 * pair + 2; ++i) {
        Eight x = floats_of(units[i]);
#pragma unroll
        for (uint32_t n = 0; n < 8; ++n) x.values[n] = change.next(x.values[n], k.values[n], rows[i % 2]);
        state[step(i)] = nibble::rounded(x);
      }
    }
  }
};

// Eight lanes have a row, and each thread four rows.
template <>
struct Rows<Floats> {
  static constexpr uint32_t kUnits = kHead * kHead * 4 / 16 / kThreads, kLanesOfRow = 8;
  static constexpr uint32_t kRowsAtATime = kThreads / kLanesOfRow, kRows = kHead / kRowsAtATime;

  __device__ __forceinline__ static uint32_t row(uint32_t i) {
    return i % kRows * kRowsAtATime + threadIdx.x / kLanesOfRow;
  }
  __device__ __forceinline__ static uint32_t unit(uint32_t column) {
    return column * kLanesOfRow + threadIdx.x % kLanesOfRow;
  }
  __device__ __forceinline__ static uint32_t first() { return row(0) * (kHead / 4) + unit(0); }
  __device__ __forceinline__ static constexpr uint32_t step(uint32_t i) {
    return i % kRows * kRowsAtATime * (kHead / 4) + i / kRows * kLanesOfRow;
  }

  __device__ __forceinline__ static void update(const uint4* memory, const Inputs& in, const float* values,
                                                const Change& change, uint4* state, float* outputs) {
    const auto four = [&](const float* vector, uint32_t column) {
      return reinterpret_cast<const float4*>(vector)[unit(column)];
    };
    const auto part = [&](uint32_t i) { return reinterpret_cast<const float4*>(memory)[i * kThreads]; };
    float with_k[kRows] = {}, with_q[kRows] = {};
#pragma unroll
    for (uint32_t column = 0; column < kUnits / kRows; ++column) {
      const float4 k = four(in.key, column), q = four(in.query, column);
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r) {
        const float4 x = part(column * kRows + r);
        add_dot(with_k[r], x, k), add_dot(with_q[r], x, q);
      }
    }
    Change::Row rows[kRows];
#pragma unroll
    for (uint32_t r = 0; r < kRows; ++r) {
      rows[r] = change.of(sum_of_lanes<kLanesOfRow>(with_k[r]), sum_of_lanes<kLanesOfRow>(with_q[r]),
                          values[row(r)]);
      if (threadIdx.x % kLanesOfRow == 0) outputs[row(r)] = rounded(rows[r].output);
    }
#pragma unroll
    for (uint32_t column = 0; column < kUnits / kRows; ++column) {
      const float4 k = four(in.key, column);
#pragma unroll
      for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t i = column * kRows + r;
        const float4 x = part(i);
        reinterpret_cast<float4*>(state)[step(i)] =
            make_float4(change.next(x.x, k.x, rows[r]), change.next(x.y, k.y, rows[r]),
                        change.next(x.z, k.z, rows[r]), change.next(x.w, k.w, rows[r]));
      }
    }
  }
};

}  // namespace nibble::gated_delta
