// nibble::route_experts and norm_route_experts: the product with the gate on tensor cores, and the choice.
// A cluster of thread blocks shares the experts of Groups * 8 tokens, the warps of a block share the columns.
// Each logit is added up in one order: a token's results do not depend on the others, on Groups or on the
// cluster.
#pragma once

#include "router/choose.cuh"
#include "router/problem.h"

namespace nibble::router {

// ChunksOfWarp: the most 32s of columns that a warp has. It multiplies a part of them at a time.
template <uint32_t ChunksOfWarp, uint32_t GroupsOfTokens, bool HasNorm>
struct Form {
  static constexpr uint32_t kChunks = ChunksOfWarp, kGroups = GroupsOfTokens;
  static constexpr bool kHasNorm = HasNorm;
  static constexpr uint32_t kThreads = kWarps * kLanes, kTokens = kGroups * router::kTokens;
  static constexpr uint32_t kPart = kGroups == 4 ? 2 : 4, kParts = kChunks / kPart;
  // Parts of the gate in registers: the next is on its way while one is multiplied.
  static constexpr uint32_t kBuffers = kChunks * kGroups <= 4 || (kChunks * kGroups <= 8 && !HasNorm) ? 2 : 1;
  static constexpr uint32_t kTokenStride = kRows + 4;  // floats: without bank conflicts
  static constexpr uint32_t kPartialFloats = kWarps * kTokens * kTokenStride;
  static constexpr uint32_t kMostColumns = kChunks * kWarps * kChunk;
};

__host__ __device__ constexpr uint32_t round_up(uint32_t a, uint32_t to) { return (a + to - 1) / to * to; }

// Experts in a row of logits: as many as the choice reads.
__host__ __device__ constexpr uint32_t experts_stride(uint32_t experts) {
  return experts <= 128 ? 128 : experts <= 256 ? 256 : 512;
}

template <class F>
__host__ __device__ constexpr uint32_t shared_bytes(uint32_t experts, uint32_t ranks) {
  const uint32_t rows = (F::kTokens + ranks - 1) / ranks;
  const uint32_t norm_bytes = F::kHasNorm ? 2 * F::kMostColumns * 2 : 0;  // with a shared expert's gate
  return norm_bytes + 4 * (F::kPartialFloats + 2 * kWarps * F::kTokens +
                           (rows + 1) * experts_stride(experts) + F::kTokens);
}

template <class F>
class Router {
 public:
  __device__ __forceinline__ Router(const Problem& problem, uint32_t ranks, uint4* shared)
      : p_(problem),
        ranks_(ranks),
        rank_(ranks > 1 ? instruction::cluster_rank() : 0),
        first_token_(blockIdx.x / ranks * F::kTokens),
        tokens_(min(F::kTokens, problem.tokens - first_token_)),
        chunks_(problem.columns / kChunk),
        stride_(problem.columns / 8),
        norm_(shared),
        shared_gate_(norm_ + (F::kHasNorm ? F::kMostColumns / 8 : 0)),
        partials_(reinterpret_cast<float*>(shared_gate_ + (F::kHasNorm ? F::kMostColumns / 8 : 0))),
        squares_(partials_ + F::kPartialFloats),
        dots_(squares_ + kWarps * F::kTokens),
        bias_(dots_ + kWarps * F::kTokens),
        logits_(bias_ + experts_stride(problem.experts)),
        padding_(reinterpret_cast<uint32_t*>(
            logits_ + (F::kTokens + ranks - 1) / ranks * experts_stride(problem.experts))) {}

  __device__ __forceinline__ void run() {
    // What no kernel before this one writes.
#pragma unroll
    for (uint32_t i = 0; i < F::kBuffers; ++i) load_gate(i, gates_[i]);
    copy_constants();
    if (ranks_ > 1) instruction::begin_cluster_barrier();
    instruction::let_next_kernel_start();
    instruction::wait_for_previous_kernel();
    if (threadIdx.x < F::kTokens)
      padding_[threadIdx.x] = p_.padding && threadIdx.x < tokens_ && p_.padding[first_token_ + threadIdx.x];
    load_x();
    instruction::wait_for_copies<0>();
    find_logits();
    choose();
    if (F::kHasNorm && p_.shared_gate) find_shared_factors();
  }

 private:
  static constexpr uint32_t kPart = F::kPart;
  struct Gate {
    uint4 upper[kPart], lower[kPart];  // rows row_in_group() and row_in_group() + 8
  };

  __device__ __forceinline__ static uint32_t warp() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ static uint32_t row_in_group() { return threadIdx.x % kLanes / 4; }
  __device__ __forceinline__ static uint32_t quarter() { return threadIdx.x % 4; }

  // Number i of this warp's chunks; a chunk's columns 8 quarter() ... are one load.
  __device__ __forceinline__ uint32_t chunk(uint32_t i) const { return warp() + i * kWarps; }
  __device__ __forceinline__ bool is_chunk(uint32_t i) const { return chunk(i) < chunks_; }
  __device__ __forceinline__ uint32_t place(uint32_t i) const { return chunk(i) * (kChunk / 8) + quarter(); }

  // The units of work: parts of the 16s of experts that this block has.
  __device__ __forceinline__ uint32_t tiles() const {
    return (((p_.experts + kRows - 1) / kRows) + ranks_ - 1 - rank_) / ranks_;
  }
  __device__ __forceinline__ uint32_t first_expert(uint32_t tile) const {
    return (tile * ranks_ + rank_) * kRows;
  }

  __device__ __forceinline__ void load_gate(uint32_t unit, Gate& gate) const {
    const uint32_t tile = unit / F::kParts, part = unit % F::kParts;
    if (tile >= tiles()) return;
    const uint32_t row = first_expert(tile) + row_in_group(), last = p_.experts - 1;
    const uint4 *const upper = p_.gate + size_t{min(row, last)} * stride_,
                *const lower = p_.gate + size_t{min(row + 8, last)} * stride_;
#pragma unroll
    for (uint32_t i = 0; i < kPart; ++i) {
      const uint32_t number = part * kPart + i;
      gate.upper[i] = gate.lower[i] = make_uint4(0, 0, 0, 0);
      if (is_chunk(number)) {
        gate.upper[i] = instruction::load_once(upper + place(number));
        gate.lower[i] = instruction::load_once(lower + place(number));
      }
    }
  }

  // The norm's weight, the shared expert's gate and the bias, to shared memory.
  __device__ __forceinline__ void copy_constants() const {
    if (F::kHasNorm && threadIdx.x < stride_) {
      copy(norm_ + threadIdx.x, p_.norm + threadIdx.x);
      if (p_.shared_gate) copy(shared_gate_ + threadIdx.x, p_.shared_gate + threadIdx.x);
    }
    if (p_.bias && threadIdx.x < p_.experts) {
      instruction::copy_word(instruction::shared_place(reinterpret_cast<uint8_t*>(bias_ + threadIdx.x)),
                             reinterpret_cast<const uint32_t*>(p_.bias + threadIdx.x));
    }
    instruction::end_copies();
  }
  __device__ __forceinline__ static void copy(uint4* to, const uint4* from) {
    instruction::copy_once(instruction::shared_place(reinterpret_cast<uint8_t*>(to)), from);
  }

  __device__ __forceinline__ bool is_token(uint32_t group) const {
    return group * kTokens + row_in_group() < tokens_;
  }
  __device__ __forceinline__ size_t row(uint32_t group) const {
    return size_t{first_token_ + group * kTokens + row_in_group()} * stride_;
  }

  // Lane 4 r + c has columns 8 c ... of each chunk of token r, as the products take them.
  __device__ __forceinline__ void load_x() {
    if constexpr (F::kHasNorm) {
      add_and_norm();
    } else {
#pragma unroll
      for (uint32_t group = 0; group < F::kGroups; ++group) {
#pragma unroll
        for (uint32_t i = 0; i < F::kChunks; ++i) {
          x_[group][i] = make_uint4(0, 0, 0, 0);
          if (is_token(group) && is_chunk(i)) x_[group][i] = p_.x[row(group) + place(i)];
        }
      }
    }
  }

  __device__ __forceinline__ Eight sum_at(uint32_t group, uint32_t i) const {
    return sum_of(p_.x[row(group) + place(i)], p_.residual[row(group) + place(i)]);
  }

  // x + residual in float32, its norm, and both rounded. Every block of a cluster has all of it and writes a
  // share. The second read comes from the first cache.
  __device__ __forceinline__ void add_and_norm() {
#pragma unroll
    for (uint32_t group = 0; group < F::kGroups; ++group) {
      float squares = 0;
#pragma unroll
      for (uint32_t i = 0; i < F::kChunks; ++i) {
        if (!is_token(group) || !is_chunk(i)) continue;
        const Eight x = sum_at(group, i);
        if (i % ranks_ == rank_) p_.sum[row(group) + place(i)] = rounded(x);
        squares += dot(x, x);
      }
      squares += __shfl_xor_sync(~0u, squares, 1);
      squares += __shfl_xor_sync(~0u, squares, 2);
      if (quarter() == 0) squares_[warp() * F::kTokens + group * kTokens + row_in_group()] = squares;
    }
    instruction::wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (uint32_t group = 0; group < F::kGroups; ++group) {
      const float factor =
          factor_of(p_, sum_of_warps(squares_ + group * kTokens + row_in_group(), F::kTokens));
      float dots = 0;
#pragma unroll
      for (uint32_t i = 0; i < F::kChunks; ++i) {
        x_[group][i] = make_uint4(0, 0, 0, 0);
        if (!is_token(group) || !is_chunk(i)) continue;
        x_[group][i] = normal_of(p_, sum_at(group, i), factor, norm_[place(i)]);
        if (i % ranks_ == rank_) p_.normed[row(group) + place(i)] = x_[group][i];
        if (p_.shared_gate) dots += dot(floats_of(x_[group][i]), floats_of(shared_gate_[place(i)]));
      }
      if (!p_.shared_gate) continue;
      dots += __shfl_xor_sync(~0u, dots, 1);
      dots += __shfl_xor_sync(~0u, dots, 2);
      if (quarter() == 0) dots_[warp() * F::kTokens + group * kTokens + row_in_group()] = dots;
    }
  }

  // One number of each warp, as a tree.
  __device__ __forceinline__ static float sum_of_warps(const float* first, uint32_t stride) {
    float sums[kWarps];
#pragma unroll
    for (uint32_t i = 0; i < kWarps; ++i) sums[i] = first[i * stride];
#pragma unroll
    for (uint32_t by = 1; by < kWarps; by *= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kWarps; i += 2 * by) sums[i] += sums[i + by];
    }
    return sums[0];
  }

  __device__ __forceinline__ void find_logits() {
    const uint32_t units = tiles() * F::kParts;
    bool others_have_begun = ranks_ == 1;
    float sums[F::kGroups][2][4];
    for (uint32_t begin = 0; begin < units; begin += F::kBuffers) {
#pragma unroll
      for (uint32_t buffer = 0; buffer < F::kBuffers; ++buffer) {
        const uint32_t unit = begin + buffer, part = unit % F::kParts;
        if (unit >= units) break;
        if (part == 0) clear(sums);
        multiply(part, gates_[buffer], sums);
        load_gate(unit + F::kBuffers, gates_[buffer]);
        if (part != F::kParts - 1) continue;
        keep(sums);
        __syncthreads();
        if (!others_have_begun) instruction::end_cluster_barrier();
        others_have_begun = true;
        send(first_expert(unit / F::kParts));
        if (unit + 1 < units) __syncthreads();  // the sums are read
      }
    }
    if (!others_have_begun) instruction::end_cluster_barrier();
    if (ranks_ > 1) {
      instruction::cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ static void clear(float (&sums)[F::kGroups][2][4]) {
#pragma unroll
    for (uint32_t group = 0; group < F::kGroups; ++group) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) sums[group][0][i] = sums[group][1][i] = 0;
    }
  }

  // Two chains of products, so that one need not wait for the other.
  __device__ __forceinline__ void multiply(uint32_t part, const Gate& gate,
                                           float (&sums)[F::kGroups][2][4]) const {
#pragma unroll
    for (uint32_t each = 0; each < F::kParts; ++each) {
      if (each != part) continue;
#pragma unroll
      for (uint32_t i = 0; i < kPart; ++i) {
        const uint4 &a = gate.upper[i], &b = gate.lower[i];
#pragma unroll
        for (uint32_t group = 0; group < F::kGroups; ++group) {
          const uint4& x = x_[group][each * kPart + i];
          instruction::mma_bfloats(sums[group][0], a.x, b.x, a.y, b.y, x.x, x.y);
          instruction::mma_bfloats(sums[group][1], a.z, b.z, a.w, b.w, x.z, x.w);
        }
      }
    }
  }

  __device__ __forceinline__ void keep(const float (&sums)[F::kGroups][2][4]) const {
#pragma unroll
    for (uint32_t group = 0; group < F::kGroups; ++group) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t token = group * kTokens + 2 * quarter() + i % 2, expert = row_in_group() + i / 2 * 8;
        partials_[(warp() * F::kTokens + token) * F::kTokenStride + expert] =
            sums[group][0][i] + sums[group][1][i];
      }
    }
  }

  // The logits of 16 experts, each to the block that chooses for its token.
  __device__ __forceinline__ void send(uint32_t first) const {
#pragma unroll
    for (uint32_t begin = 0; begin < F::kTokens * kRows; begin += F::kThreads) {
      const uint32_t token = (begin + threadIdx.x) / kRows, expert = threadIdx.x % kRows;
      if (token >= tokens_ || first + expert >= p_.experts) continue;
      float logit = sum_of_warps(partials_ + token * F::kTokenStride + expert, F::kTokens * F::kTokenStride);
      if (p_.round_logits) logit = __bfloat162float(__float2bfloat16_rn(logit));
      float* const to = logits_ + token / ranks_ * experts_stride(p_.experts) + first + expert;
      if (ranks_ > 1) {
        instruction::store_to_rank(to, token % ranks_, logit);
      } else {
        *to = logit;
      }
    }
  }

  __device__ __forceinline__ void choose() const {
    for (uint32_t i = warp(); i * ranks_ + rank_ < tokens_; i += kWarps) {
      const uint32_t token = i * ranks_ + rank_;
      const float* const logits = logits_ + i * experts_stride(p_.experts);
      if (p_.experts <= 128) {
        choose<4>(token, logits);
      } else if (p_.experts <= 256) {
        choose<8>(token, logits);
      } else {
        choose<16>(token, logits);
      }
    }
  }
  template <uint32_t Each>
  __device__ __forceinline__ void choose(uint32_t token, const float* logits) const {
    float scores[Each];
    load_floats(scores, logits + threadIdx.x % kLanes * Each);
    Choice<Each>{p_, bias_, first_token_ + token, padding_[token] != 0}.run(scores);
  }

  // In the last warp, which has the fewest tokens to choose for; each block has a share of the tokens.
  __device__ __forceinline__ void find_shared_factors() const {
    const uint32_t token = threadIdx.x % kLanes;
    if (warp() != kWarps - 1 || token >= tokens_ || token % ranks_ != rank_) return;
    write_shared_factor(p_, first_token_ + token, sum_of_warps(dots_ + token, F::kTokens));
  }

  const Problem& p_;
  const uint32_t ranks_, rank_, first_token_, tokens_, chunks_, stride_;
  uint4 *const norm_, *const shared_gate_;
  float *const partials_, *const squares_, *const dots_, *const bias_, *const logits_;
  uint32_t* const padding_;
  Gate gates_[F::kBuffers];
  uint4 x_[F::kGroups][F::kChunks];
};

}  // namespace nibble::router
