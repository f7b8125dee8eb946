// A router of experts: logits of a gate, scores, and the experts of the highest. For host and device.
#pragma once

#include <cstdint>

#include "nibble/arch.h"

namespace nibble::router {

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kWarps = 16;   // share the columns
inline constexpr uint32_t kChunk = 32;   // columns that a warp multiplies at a time
inline constexpr uint32_t kRows = 16;    // of the gate, in a product
inline constexpr uint32_t kTokens = 8;   // in a product
// More tokens take a norm, torch's product and a choice: docs/kernels/nvfp4_linear.md.
inline constexpr uint32_t kMostTokensAtOnce = 64;
inline constexpr uint32_t kMostWeightsAtOnce = 1 << 20;  // of a gate behind a norm
inline constexpr uint32_t kMostExperts = 512, kMostChosen = 32, kMostColumns = 4096, kMostRanks = 8;

struct Problem {
  const uint4 *x, *residual;  // bfloat16 [tokens, columns]; without a residual, which is null, no norm
  const uint4* norm;          // bfloat16 [columns], with a residual
  uint4 *normed, *sum;        // of the norm, and x + residual
  const uint4* gate;          // bfloat16 [experts, columns]
  const uint4* shared_gate;   // bfloat16 [columns], of a shared expert behind the norm, or null
  uint16_t* shared_factors;   // bfloat16 [tokens]: sigmoid of normed times shared_gate
  const void* logits;         // [tokens, experts], bfloat16 if they are rounded, else float32: choice alone
  const float* bias;          // [experts], added to the scores for the choice alone, or null
  const bool* padding;        // [tokens]: those without experts, or null
  float* weights;             // [tokens, topk]
  int32_t* ids;               // [tokens, topk]
  uint32_t tokens, experts, columns, topk;
  float epsilon, norm_offset;  // the norm's weight is norm + norm_offset
  float scale;                 // of all weights
  bool sigmoid;                // else softmax
  bool renormalize;            // the weights of a token add up to `scale`
  bool round_logits;           // to bfloat16
};

}  // namespace nibble::router
