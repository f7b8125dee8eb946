// A token's experts from its logits, in a warp.
#pragma once

#include "router/row.cuh"

namespace nibble::router {

// In the order of the numbers; above 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return max(1u, bits & 0x80000000 ? ~bits : bits | 0x80000000);
}
__device__ __forceinline__ float number_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000 ? key & 0x7fffffff : ~key);
}

// Lane i has choice i of a token. sum: of its weights.
__device__ __forceinline__ void write_choice(const Problem& p, uint32_t token, bool is_padding, float weight,
                                             int32_t id, float sum) {
  const uint32_t lane = threadIdx.x % kLanes, at = token * p.topk + lane;
  if (lane >= p.topk) return;
  const float factor = p.renormalize ? p.scale / (sum > 0 ? sum : 1.0f) : p.scale;
  p.weights[at] = is_padding ? 0.0f : weight * factor;
  p.ids[at] = is_padding ? -1 : id;
}

// A lane has `Each` neighbouring experts, so the first lane with the highest score has the lowest number.
template <uint32_t Each>
struct Choice {
  const Problem& p;
  const float* bias;  // [experts]
  uint32_t token;
  bool is_padding;

  // scores: the logits of the lane's experts; those of experts that are not there are not read.
  __device__ __forceinline__ void run(float (&scores)[Each]) {
    uint32_t keys[Each];
    find_scores(scores);
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i)
      keys[i] = !is_there(i) ? 0 : key_of(p.bias ? scores[i] + bias[first() + i] : scores[i]);
    take(scores, keys);
  }

 private:
  __device__ __forceinline__ uint32_t lane() const { return threadIdx.x % kLanes; }
  __device__ __forceinline__ uint32_t first() const { return lane() * Each; }
  __device__ __forceinline__ bool is_there(uint32_t i) const { return first() + i < p.experts; }

  __device__ __forceinline__ static uint32_t highest(const uint32_t (&keys)[Each]) {
    uint32_t key = keys[0];
#pragma unroll
    for (uint32_t i = 1; i < Each; ++i) key = max(key, keys[i]);
    return key;
  }

  __device__ __forceinline__ void find_scores(float (&scores)[Each]) const {
    if (p.sigmoid) {
#pragma unroll
      for (uint32_t i = 0; i < Each; ++i) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
      return;
    }
    uint32_t keys[Each];
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) keys[i] = is_there(i) ? key_of(scores[i]) : 0;
    const float most = number_of(__reduce_max_sync(~0u, highest(keys)));
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) scores[i] = is_there(i) ? expf(scores[i] - most) : 0.0f;
    if (p.renormalize && !p.bias) return;  // a common factor changes neither the choice nor the weights
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) sum += scores[i];
#pragma unroll
    for (uint32_t by = 1; by < kLanes; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
    const float factor = 1.0f / sum;
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) scores[i] *= factor;
  }

  __device__ __forceinline__ void take(const float (&scores)[Each], uint32_t (&keys)[Each]) const {
    uint32_t own_best = highest(keys);
    float sum = 0, weight = 0;  // lane i has the weight and the number of choice i
    int32_t id = -1;
    for (uint32_t i = 0; i < p.topk; ++i) {
      const uint32_t best = __reduce_max_sync(~0u, own_best);
      const uint32_t winner = __ffs(__ballot_sync(~0u, own_best == best)) - 1;
      uint32_t place = 0;
      float score = scores[0];
#pragma unroll
      for (uint32_t j = Each; j-- > 1;) {
        if (keys[j] == best) place = j, score = scores[j];
      }
      if (keys[0] == best) place = 0, score = scores[0];
      const bool wins = lane() == winner;
#pragma unroll
      for (uint32_t j = 0; j < Each; ++j) {
        if (wins && place == j) keys[j] = 0;
      }
      own_best = highest(keys);
      const float chosen = __shfl_sync(~0u, score, winner);
      const uint32_t number = __shfl_sync(~0u, first() + place, winner);
      sum += chosen;
      if (lane() == i) weight = chosen, id = static_cast<int32_t>(number);
    }
    write_choice(p, token, is_padding, weight, id, sum);
  }
};

template <uint32_t Each>
__device__ __forceinline__ void load_floats(float (&to)[Each], const float* from) {
#pragma unroll
  for (uint32_t i = 0; i < Each; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}
template <uint32_t Each>
__device__ __forceinline__ void load_bfloats(float (&to)[Each], const uint16_t* from) {
#pragma unroll
  for (uint32_t i = 0; i < Each; i += 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(from + i);
    to[i] = low(four.x), to[i + 1] = high(four.x), to[i + 2] = low(four.y), to[i + 3] = high(four.y);
  }
}

// A token's choice from p.logits.
template <uint32_t Each>
__device__ __forceinline__ void choose_from_memory(const Problem& p, uint32_t token) {
  const uint32_t first = threadIdx.x % kLanes * Each;
  const size_t begin = size_t{token} * p.experts + first;
  const uint16_t* const bfloats = static_cast<const uint16_t*>(p.logits) + begin;
  const float* const floats = static_cast<const float*>(p.logits) + begin;
  float logits[Each] = {};
  if (p.experts % 4 == 0) {
#pragma unroll
    for (uint32_t i = 0; i < Each; i += 4) {
      if (first + i >= p.experts) continue;
      float four[4];
      if (p.round_logits) {
        load_bfloats(four, bfloats + i);
      } else {
        load_floats(four, floats + i);
      }
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) logits[i + k] = four[k];
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < Each; ++i) {
      if (first + i < p.experts) logits[i] = p.round_logits ? low(bfloats[i]) : floats[i];
    }
  }
  Choice<Each>{p, p.bias, token, p.padding != nullptr && p.padding[token]}.run(logits);
}

}  // namespace nibble::router
