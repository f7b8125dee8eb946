// The norm in front of the product with the gate, for the tokens of a thread block: each thread has the same
// few columns of every token, and the tensor cores' operand goes through shared memory. The order of sums is
// that of norm.cuh.
#pragma once

#include <type_traits>

#include "router/row.cuh"

namespace nibble::router {

// MostColumns: 4 or 8 for each thread.
template <uint32_t MostColumns, uint32_t Tokens, uint32_t Threads>
class BlockNorm {
 public:
  static constexpr uint32_t kTokens = Tokens, kEach = MostColumns / Threads, kEights = MostColumns / 8;
  static constexpr uint32_t kRow = kEights + 4;  // of uint4: without bank conflicts
  struct alignas(16) Shared {
    uint4 rows[Tokens][kRow];
    float squares[Tokens][kEights], dots[Tokens][kEights];  // of eight columns
    float factors[Tokens];
  };

  __device__ __forceinline__ BlockNorm(const Problem& problem, Shared& shared, uint32_t first_token,
                                       uint32_t tokens)
      : p_(problem), s_(shared), first_token_(first_token), tokens_(tokens) {}

  // x + residual of all tokens in float32, and their squares. Writes the sums of every ranks-th token.
  __device__ __forceinline__ void add(uint32_t rank, uint32_t ranks) {
    Unit x[Tokens], rest[Tokens];
#pragma unroll
    for (uint32_t token = 0; token < Tokens; ++token) {
      x[token] = rest[token] = Unit{};
      if (token >= tokens_ || !is_there()) continue;
      x[token] = reinterpret_cast<const Unit*>(p_.x)[place(token)];
      rest[token] = reinterpret_cast<const Unit*>(p_.residual)[place(token)];
    }
#pragma unroll
    for (uint32_t token = 0; token < Tokens; ++token) {
      if (token >= tokens_) break;
      float(&sums)[kEach] = sums_[token];
      unpack(sums, x[token]);
      float more[kEach];
      unpack(more, rest[token]);
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) sums[i] += more[i];
      if (token % ranks == rank && is_there()) reinterpret_cast<Unit*>(p_.sum)[place(token)] = pack(sums);
      keep_dot(s_.squares[token], sums, sums);
    }
  }

  // After a barrier. norm, shared_gate: bfloat16 [columns] in shared memory. It has barriers of its own.
  __device__ __forceinline__ void scale(uint32_t rank, uint32_t ranks, const uint4* norm,
                                        const uint4* shared_gate) {
    if (warp() < tokens_) {
      const float squares = sum_of_token(s_.squares[warp()]);
      if (threadIdx.x % kLanes == 0) s_.factors[warp()] = factor_of(p_, squares);
    }
    __syncthreads();
    float weight[kEach], gate[kEach];
    unpack(weight, reinterpret_cast<const Unit*>(norm)[threadIdx.x]);
    unpack(gate, reinterpret_cast<const Unit*>(shared_gate)[threadIdx.x]);
#pragma unroll
    for (uint32_t token = 0; token < Tokens; ++token) {
      if (token >= tokens_) break;
      float(&x)[kEach] = sums_[token];
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
        x[i] = x[i] * s_.factors[token] * (weight[i] + p_.norm_offset);
      const Unit normal = pack(x);
      if (is_there()) {
        reinterpret_cast<Unit*>(s_.rows[token])[threadIdx.x] = normal;
        if (token % ranks == rank) reinterpret_cast<Unit*>(p_.normed)[place(token)] = normal;
      }
      if (!p_.shared_gate) continue;
      unpack(x, normal);
      keep_dot(s_.dots[token], x, gate);
    }
    __syncthreads();
  }

  // Eight columns of a token, as the tensor cores take them.
  __device__ __forceinline__ uint4 eight(uint32_t token, uint32_t place) const {
    return s_.rows[token][place];
  }

  // In a whole warp: the dot product of a token with the shared expert's gate.
  __device__ __forceinline__ float shared_dot(uint32_t token) const { return sum_of_token(s_.dots[token]); }

 private:
  using Unit = std::conditional_t<kEach == 4, uint2, uint4>;

  __device__ __forceinline__ static uint32_t warp() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ bool is_there() const { return threadIdx.x * kEach < p_.columns; }
  __device__ __forceinline__ size_t place(uint32_t token) const {
    return size_t{first_token_ + token} * (p_.columns / kEach) + threadIdx.x;
  }

  __device__ __forceinline__ static void unpack(float (&x)[kEach], const Unit& unit) {
    x[0] = low(unit.x), x[1] = high(unit.x), x[2] = low(unit.y), x[3] = high(unit.y);
    if constexpr (kEach == 8) x[4] = low(unit.z), x[5] = high(unit.z), x[6] = low(unit.w), x[7] = high(unit.w);
  }
  __device__ __forceinline__ static Unit pack(const float (&x)[kEach]) {
    Unit unit;
    unit.x = pair_of(x[0], x[1]), unit.y = pair_of(x[2], x[3]);
    if constexpr (kEach == 8) unit.z = pair_of(x[4], x[5]), unit.w = pair_of(x[6], x[7]);
    return unit;
  }

  // As `dot` adds up eight columns, of which two threads may have four each.
  __device__ __forceinline__ void keep_dot(float (&dots)[kEights], const float (&a)[kEach],
                                           const float (&b)[kEach]) const {
    float sum = (a[0] * b[0] + a[1] * b[1]) + (a[2] * b[2] + a[3] * b[3]);
    if constexpr (kEach == 8) {
      sum += (a[4] * b[4] + a[5] * b[5]) + (a[6] * b[6] + a[7] * b[7]);
      dots[threadIdx.x] = sum;
    } else {
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (threadIdx.x % 2 == 0) dots[threadIdx.x / 2] = sum;
    }
  }

  // In a whole warp, which stands for two of norm.cuh's.
  __device__ __forceinline__ float sum_of_token(const float (&dots)[kEights]) const {
    constexpr uint32_t kThreadsOfToken = 2 * kLanes;
    float sums[2] = {};
#pragma unroll
    for (uint32_t first = 0; first < kEights; first += kThreadsOfToken) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t place = first + i * kLanes + threadIdx.x % kLanes;
        if (place < p_.columns / 8) sums[i] += dots[place];
      }
    }
#pragma unroll
    for (uint32_t by = 1; by < kLanes; by *= 2) {
      sums[0] += __shfl_xor_sync(~0u, sums[0], by);
      sums[1] += __shfl_xor_sync(~0u, sums[1], by);
    }
    return sums[0] + sums[1];
  }

  const Problem& p_;
  Shared& s_;
  const uint32_t first_token_, tokens_;
  float sums_[Tokens][kEach];
};

}  // namespace nibble::router
