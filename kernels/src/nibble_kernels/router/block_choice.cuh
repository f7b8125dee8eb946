// A token's experts from its logits, in a thread block: the choice of choose.cuh, for 128 or 256 experts, of
// which a token gets up to 8.
//
// Eight warps have an eighth of the scores each. Their eight highest are eight scores, so no score below the
// lowest of these can be among the eight highest of all. Those that are left are compared with each other.
#pragma once

#include "router/choose.cuh"

namespace nibble::router {

inline constexpr uint32_t kParts = 8;  // of the experts, and the most that a token gets

struct BlockChoice {
  struct alignas(16) Shared {
    uint64_t left[kParts * kLanes];  // key, and numbers that are lower count more; 0 behind the last
    float scores[kParts * kLanes];  // of all experts
    uint32_t highest[kParts], chosen[kParts];  // chosen: numbers, the highest score first
    uint32_t count;
  };

  // Sums of scores have one order, that of choose.cuh: no choice that needs the sum of all.
  __device__ __forceinline__ static bool suits(const Problem& p) {
    return (p.experts == 128 || p.experts == 256) && p.topk <= kParts &&
           (p.sigmoid || (p.renormalize && p.bias == nullptr));
  }

  const Problem& p;
  const float *logits, *bias;  // [experts]
  uint32_t token;
  bool is_padding;
  Shared& s;

  // In all threads of the block, of which there are at least 256.
  __device__ __forceinline__ void run() const {
    const uint32_t each = p.experts / kParts, part = threadIdx.x / kLanes;
    const bool is_part = part < kParts, has_expert = is_part && lane() < each;
    const uint32_t expert = part * each + lane();
    if (threadIdx.x == 0) s.count = 0;
    uint32_t key = 0;
    if (is_part) {
      s.left[threadIdx.x] = 0;
      const float most = p.sigmoid ? 0 : highest_logit();
      if (has_expert) key = key_of_expert(expert, most);
      const uint32_t highest = __reduce_max_sync(~0u, key);
      if (lane() == 0) s.highest[part] = highest;
    }
    __syncthreads();
    if (is_part) {
      uint32_t least = s.highest[0];
#pragma unroll
      for (uint32_t i = 1; i < kParts; ++i) least = min(least, s.highest[i]);
      const bool is_left = has_expert && key >= least;
      const uint32_t all = __ballot_sync(~0u, is_left);
      uint32_t place = lane() == 0 ? atomicAdd(&s.count, __popc(all)) : 0;
      place = __shfl_sync(~0u, place, 0) + __popc(all & ((1u << lane()) - 1));
      if (is_left) s.left[place] = uint64_t{key} << 32 | (kParts * kLanes - expert);
    }
    __syncthreads();
    if (threadIdx.x < s.count) find_rank(s.left[threadIdx.x]);
    __syncthreads();
    if (part == 0) write();
  }

 private:
  __device__ __forceinline__ static uint32_t lane() { return threadIdx.x % kLanes; }
  // In a whole warp.
  __device__ __forceinline__ float highest_logit() const {
    uint32_t key = 0;
#pragma unroll
    for (uint32_t first = 0; first < kParts * kLanes; first += kLanes) {
      if (first < p.experts) key = max(key, key_of(logits[first + lane()]));
    }
    return number_of(__reduce_max_sync(~0u, key));
  }
  __device__ __forceinline__ uint32_t key_of_expert(uint32_t expert, float most) const {
    const float logit = logits[expert], score = p.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - most);
    s.scores[expert] = score;
    return key_of(bias ? score + bias[expert] : score);
  }

  __device__ __forceinline__ void find_rank(uint64_t own) const {
    constexpr uint32_t kAtATime = 8;
    uint32_t rank = 0;
    for (uint32_t first = 0; first < s.count; first += kAtATime) {
#pragma unroll
      for (uint32_t i = 0; i < kAtATime; ++i) rank += s.left[first + i] > own;
    }
    if (rank < p.topk) s.chosen[rank] = kParts * kLanes - static_cast<uint32_t>(own);
  }

  __device__ __forceinline__ void write() const {
    const uint32_t number = lane() < p.topk ? s.chosen[lane()] : 0;
    const float weight = s.scores[number];
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      const float next = __shfl_sync(~0u, weight, i);
      if (i < p.topk) sum += next;
    }
    write_choice(p, token, is_padding, weight, static_cast<int32_t>(number), sum);
  }
};

}  // namespace nibble::router
