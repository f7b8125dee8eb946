// The experts of each token: those that the router chose and, where the layer has one, the shared expert
// behind them. A pair is a token and one of its experts, in that order.
#pragma once

#include "nibble/bfloats.cuh"

namespace nibble::experts {

struct Chosen {
  const int32_t* ids;              // [tokens, topk]; below 0 or too large: an expert of another process
  const float* weights;            // [tokens, topk]
  const uint16_t* shared_weights;  // bfloat16 [tokens], or null without a shared expert
  uint32_t topk, routed;           // a token's and all experts of the router

  __host__ __device__ __forceinline__ uint32_t has_shared() const { return shared_weights != nullptr; }
  // Of a token, and of the layer.
  __host__ __device__ __forceinline__ uint32_t pairs_of_token() const { return topk + has_shared(); }
  __host__ __device__ __forceinline__ uint32_t experts() const { return routed + has_shared(); }

  // The number of an expert, that of the shared one being the last; -1 for those of other processes.
  __device__ __forceinline__ int32_t expert_of(uint32_t token, uint32_t i) const {
    return i < topk ? known(ids[token * topk + i]) : static_cast<int32_t>(routed);
  }
  __device__ __forceinline__ int32_t expert_of(uint32_t pair) const {
    if (!has_shared()) return known(ids[pair]);
    const uint32_t token = pair / (topk + 1);
    return expert_of(token, pair - token * (topk + 1));
  }
  __device__ __forceinline__ float weight_of(uint32_t pair) const {
    if (!has_shared()) return weights[pair];
    const uint32_t token = pair / (topk + 1), i = pair - token * (topk + 1);
    return i < topk ? weights[token * topk + i] : low(shared_weights[token]);
  }

 private:
  __device__ __forceinline__ int32_t known(int32_t id) const {
    return static_cast<uint32_t>(id) < routed ? id : -1;
  }
};

}  // namespace nibble::experts
