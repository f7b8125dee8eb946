// Linear attention with the gated delta rule, of heads with 128 keys and 128 values. For host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/arch.h"

namespace nibble::gated_delta {

inline constexpr uint32_t kHead = 128;     // keys, and values, of a head
inline constexpr uint32_t kTaps = 4;       // of the convolution, the token's own with them
inline constexpr uint32_t kMostShare = 8;  // value heads of a key head: a cluster
inline constexpr uint32_t kLanes = 32;

// Strides are in elements. bfloat16 is uint16_t here.
struct Problem {
  const uint16_t* x;            // bfloat16 [tokens, columns]: input of the products
  const uint16_t* gates;        // bfloat16 [2 value heads, columns]: weight of the gates b and a
  const uint16_t* qkvz;         // bfloat16 [tokens, twice the keys and twice the values]
  const uint16_t* conv_weight;  // bfloat16 [twice the keys and the values, 4]
  uint16_t* conv_state;         // bfloat16 [slots, channels as above, 3]
  void* state;                  // float32 or bfloat16 [slots, value heads, values, keys]
  const int32_t* slots;         // of each sequence; 0 and less: none, its output is 0
  const float *a_log, *dt_bias;  // [value heads]
  const float* norm;            // [values]
  uint16_t* out;                // bfloat16 [tokens, value heads, values]
  int64_t qkvz_stride;          // of a token
  int64_t conv_slot_stride, conv_channel_stride, conv_token_stride;
  int64_t state_slot_stride;
  uint32_t tokens, live_tokens;  // those from live_tokens on are no sequences
  uint32_t columns, key_heads, value_heads, slot_stride;
  float epsilon;
  uint32_t is_interleaved;  // a key head with its value heads follows another, else all queries come first
  uint32_t is_sigmoid;      // the output's gate; else x sigmoid(x)
};

// Sequences of any number of tokens, one behind the other.
struct Prompts {
  Problem p;
  const int32_t* starts;  // [sequences + 1]: the first token of each, and the number of all
  const bool* has_state;  // [sequences]; others begin with a state of 0
  const uint16_t* ba;     // bfloat16 [tokens, 2 value heads]: the gates' product
  uint16_t* convolved;    // bfloat16 [tokens, channels]
  float* factors;         // [tokens, 2 key heads]: of queries and keys, that make their length 1
  uint32_t sequences;
};

// Where parts 0 (query), 1 (key), 2 (value) and 3 (z) of a value head begin.
struct Place {
  uint32_t key_heads, value_heads, share, group, rank;

  NIBBLE_FUNCTION Place(const Problem& p, uint32_t share, uint32_t group, uint32_t rank)
      : key_heads(p.key_heads), value_heads(p.value_heads), share(share), group(group), rank(rank) {}
  NIBBLE_FUNCTION Place(const Problem& p, uint32_t head)
      : key_heads(p.key_heads),
        value_heads(p.value_heads),
        share(p.value_heads / p.key_heads),
        group(head / share),
        rank(head % share) {}

  // Among the convolution's channels, which z follows.
  NIBBLE_FUNCTION uint32_t channel(uint32_t part) const {
    const uint32_t head = part < 2 ? part * key_heads + group
                                   : 2 * key_heads + (part - 2) * value_heads + group * share + rank;
    return head * kHead;
  }
  // In a row of qkvz.
  NIBBLE_FUNCTION uint32_t column(uint32_t part, bool is_interleaved) const {
    if (!is_interleaved) return channel(part);
    const uint32_t in_group = part < 2 ? part : 2 + (part - 2) * share + rank;
    return (group * (2 + 2 * share) + in_group) * kHead;
  }
  // In a row of the gates' product: b, or a.
  NIBBLE_FUNCTION uint32_t gate(uint32_t is_a, bool is_interleaved) const {
    return is_interleaved ? (group * 2 + is_a) * share + rank : is_a * value_heads + group * share + rank;
  }
};

}  // namespace nibble::gated_delta
