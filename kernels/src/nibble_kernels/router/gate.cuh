// nibble::route_experts and norm_route_experts: the product with the gate on tensor cores, and the choice.
// A cluster of thread blocks shares the experts of Groups * 8 tokens, the warps of a block share the columns.
// Each logit is added up in one order: a token's results do not depend on the others, on Groups or on the
// cluster.
#pragma once

#include "router/block_choice.cuh"
#include "router/block_norm.cuh"
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
  static constexpr uint32_t kTiles = kBuffers > kParts ? kBuffers / kParts : 1;  // 16s of experts at a time
  static constexpr uint32_t kTokenStride = kRows + 4;  // floats: without bank conflicts
  static constexpr uint32_t kTileFloats = kWarps * kTokens * kTokenStride;
  static constexpr uint32_t kPartialFloats = kTiles * kTileFloats;
  static constexpr uint32_t kMostColumns = kChunks * kWarps * kChunk;
  // For more tokens the warps of the products are faster.
  using BlockNorm = router::BlockNorm<kMostColumns, kChunks == 4 ? 4 : 2, kThreads>;
  static constexpr bool kHasBlockNorm = kHasNorm && kGroups == 1;
  static constexpr uint32_t kBlockNormBytes = kHasBlockNorm ? sizeof(typename BlockNorm::Shared) : 0;
  static_assert(sizeof(BlockChoice::Shared) <= 4 * kPartialFloats);
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
  return norm_bytes + F::kBlockNormBytes + 4 * (F::kPartialFloats + 2 * kWarps * F::kTokens +
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
        block_norm_(shared_gate_ + (F::kHasNorm ? F::kMostColumns / 8 : 0)),
        partials_(reinterpret_cast<float*>(block_norm_ + F::kBlockNormBytes / sizeof(uint4))),
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
      if constexpr (F::kHasBlockNorm) {
        if (has_few_tokens()) return add_and_norm_few();
      }
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

  __device__ __forceinline__ bool has_few_tokens() const {
    return F::kHasBlockNorm && tokens_ <= F::BlockNorm::kTokens;
  }
  __device__ __forceinline__ typename F::BlockNorm block_norm() const {
    auto& shared = *reinterpret_cast<typename F::BlockNorm::Shared*>(block_norm_);
    return typename F::BlockNorm(p_, shared, first_token_, tokens_);
  }

  __device__ __forceinline__ void add_and_norm_few() {
    auto norm = block_norm();
    norm.add(rank_, ranks_);
    instruction::wait_for_copies<0>();
    __syncthreads();
    norm.scale(rank_, ranks_, norm_, shared_gate_);
#pragma unroll
    for (uint32_t i = 0; i < F::kChunks; ++i) {
      x_[0][i] = make_uint4(0, 0, 0, 0);
      if (is_token(0) && is_chunk(i)) x_[0][i] = norm.eight(row_in_group(), place(i));
    }
  }

  // x + residual of some of a token's chunks, 0 where there is none. All loads are on their way before the
  // first result is stored: the compiler does not move a load before a store.
  static constexpr uint32_t kSums = F::kGroups * F::kChunks > 8 ? 2 : 4;
  static_assert(F::kChunks % kSums == 0);
  __device__ __forceinline__ void load_sums(uint32_t group, uint32_t first, Eight (&sums)[kSums]) const {
    uint4 x[kSums], rest[kSums];
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) {
      x[i] = rest[i] = make_uint4(0, 0, 0, 0);
      if (!is_token(group) || !is_chunk(first + i)) continue;
      x[i] = p_.x[row(group) + place(first + i)];
      rest[i] = p_.residual[row(group) + place(first + i)];
    }
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) sums[i] = sum_of(x[i], rest[i]);
  }

  // x + residual in float32, its norm, and both rounded. Every block of a cluster has all of it and writes a
  // share. If registers have no room for the sums, they are read twice, then from the first cache.
  __device__ __forceinline__ void add_and_norm() {
    constexpr bool kKeepsSums = F::kGroups * F::kChunks == kSums;
    Eight sums[kSums];
#pragma unroll
    for (uint32_t group = 0; group < F::kGroups; ++group) {
      float squares = 0;
#pragma unroll
      for (uint32_t first = 0; first < F::kChunks; first += kSums) {
        load_sums(group, first, sums);
#pragma unroll
        for (uint32_t i = 0; i < kSums; ++i) {
          if (!is_token(group) || !is_chunk(first + i)) continue;
          if ((first + i) % ranks_ == rank_) p_.sum[row(group) + place(first + i)] = rounded(sums[i]);
          squares += dot(sums[i], sums[i]);
        }
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
      for (uint32_t first = 0; first < F::kChunks; first += kSums) {
        if constexpr (!kKeepsSums) load_sums(group, first, sums);
#pragma unroll
        for (uint32_t i = 0; i < kSums; ++i) {
          uint4& x = x_[group][first + i];
          x = make_uint4(0, 0, 0, 0);
          if (!is_token(group) || !is_chunk(first + i)) continue;
          x = normal_of(p_, sums[i], factor, norm_[place(first + i)]);
          if ((first + i) % ranks_ == rank_) p_.normed[row(group) + place(first + i)] = x;
          if (p_.shared_gate) dots += dot(floats_of(x), floats_of(shared_gate_[place(first + i)]));
        }
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
    if (ranks_ > 1 && tiles() == 0) instruction::end_cluster_barrier();
    for (uint32_t begin = 0; begin < tiles(); begin += F::kTiles) {
#pragma unroll
      for (uint32_t i = 0; i < F::kTiles; ++i) {
        if (begin + i >= tiles()) break;
        float sums[F::kGroups][2][4];
        clear(sums);
#pragma unroll
        for (uint32_t part = 0; part < F::kParts; ++part) {
          Gate& gate = gates_[(i * F::kParts + part) % F::kBuffers];
          multiply(part, gate, sums);
          load_gate((begin + i) * F::kParts + part + F::kBuffers, gate);
        }
        keep(i, sums);
      }
      __syncthreads();
      if (ranks_ > 1 && begin == 0) instruction::end_cluster_barrier();  // the others have begun
      send(begin);
      if (begin + F::kTiles < tiles()) __syncthreads();  // the sums are read
    }
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
    for (uint32_t i = 0; i < kPart; ++i) {
      const uint4 &a = gate.upper[i], &b = gate.lower[i];
#pragma unroll
      for (uint32_t group = 0; group < F::kGroups; ++group) {
        const uint4& x = x_[group][part * kPart + i];
        instruction::mma_bfloats(sums[group][0], a.x, b.x, a.y, b.y, x.x, x.y);
        instruction::mma_bfloats(sums[group][1], a.z, b.z, a.w, b.w, x.z, x.w);
      }
    }
  }

  __device__ __forceinline__ void keep(uint32_t tile, const float (&sums)[F::kGroups][2][4]) const {
#pragma unroll
    for (uint32_t group = 0; group < F::kGroups; ++group) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t token = group * kTokens + 2 * quarter() + i % 2, expert = row_in_group() + i / 2 * 8;
        partials_[tile * F::kTileFloats + (warp() * F::kTokens + token) * F::kTokenStride + expert] =
            sums[group][0][i] + sums[group][1][i];
      }
    }
  }

  // The logits of some 16s of experts, each to the block that chooses for its token.
  __device__ __forceinline__ void send(uint32_t first_tile) const {
    constexpr uint32_t kOfTile = F::kTokens * kRows;
#pragma unroll
    for (uint32_t begin = 0; begin < F::kTiles * kOfTile; begin += F::kThreads) {
      const uint32_t place = begin + threadIdx.x, tile = place / kOfTile, token = place % kOfTile / kRows;
      const uint32_t expert = first_expert(first_tile + tile) + place % kRows;
      if (tile >= F::kTiles || token >= tokens_ || expert >= p_.experts) continue;
      const float* const partials = partials_ + tile * F::kTileFloats + token * F::kTokenStride;
      float logit = sum_of_warps(partials + place % kRows, F::kTokens * F::kTokenStride);
      if (p_.round_logits) logit = __bfloat162float(__float2bfloat16_rn(logit));
      float* const to = logits_ + token / ranks_ * experts_stride(p_.experts) + expert;
      if (ranks_ > 1) {
        instruction::store_to_rank(to, token % ranks_, logit);
      } else {
        *to = logit;
      }
    }
  }

  __device__ __forceinline__ void choose() const {
    if (tokens_ <= ranks_ && BlockChoice::suits(p_)) {
      if (rank_ >= tokens_) return;
      auto& shared = *reinterpret_cast<BlockChoice::Shared*>(partials_);
      const float* const bias = p_.bias ? bias_ : nullptr;
      return BlockChoice{p_, logits_, bias, first_token_ + rank_, padding_[rank_] != 0, shared}.run();
    }
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
    if (warp() != kWarps - 1) return;
    const uint32_t lane = threadIdx.x % kLanes;
    if (has_few_tokens()) {
      for (uint32_t token = rank_; token < tokens_; token += ranks_) {
        const float sum = block_norm().shared_dot(token);
        if (lane == 0) write_shared_factor(p_, first_token_ + token, sum);
      }
    } else if (lane < tokens_ && lane % ranks_ == rank_) {
      write_shared_factor(p_, first_token_ + lane, sum_of_warps(dots_ + lane, F::kTokens));
    }
  }

  const Problem& p_;
  const uint32_t ranks_, rank_, first_token_, tokens_, chunks_, stride_;
  uint4 *const norm_, *const shared_gate_, *const block_norm_;
  float *const partials_, *const squares_, *const dots_, *const bias_, *const logits_;
  uint32_t* const padding_;
  Gate gates_[F::kBuffers];
  uint4 x_[F::kGroups][F::kChunks];
};

}  // namespace nibble::router
