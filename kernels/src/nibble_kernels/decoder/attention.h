// One new token's attention to a paged cache in BF16: keys [block][kv head][head size][tokens of a block],
// values [block][kv head][tokens of a block][head size], as vLLM's CPU backend stores them without AMX.
#pragma once

#include "rows.h"

namespace nibble::cpu {

struct Cache {
  BFloat16* keys;
  BFloat16* values;
  int64_t block_stride, head_stride;  // elements
  int64_t block_tokens;
};

struct Heads {
  int64_t queries, keys, size;
  int64_t queries_each() const { return queries / keys; }
  int64_t width() const { return (queries + 2 * keys) * size; }  // of a row of queries, keys and values
};

// Keys are stored by column: each element of a key lies apart.
inline void write_cache(const Cache& cache, const Heads& heads, int64_t slot, const BFloat16* keys,
                        const BFloat16* values) {
  const int64_t block = slot / cache.block_tokens, token = slot % cache.block_tokens;
  for (int64_t head = 0; head < heads.keys; ++head) {
    const int64_t at = block * cache.block_stride + head * cache.head_stride;
    BFloat16* key = cache.keys + at + token;
    for (int64_t i = 0; i < heads.size; ++i) key[i * cache.block_tokens] = keys[head * heads.size + i];
    std::memcpy(cache.values + at + token * heads.size, values + head * heads.size, heads.size * sizeof(BFloat16));
  }
}

// Registers of BF16 numbers, as even ones and odd ones in float32. Vectors that are wider than the processor's
// go through memory (gcc 12).
template <int kLanes>
struct Vectors;
template <>
struct Vectors<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
};
template <>
struct Vectors<8> {
  typedef float Floats __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
};
template <>
struct Vectors<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Words __attribute__((vector_size(64)));
};

constexpr int64_t kTokensAtOnce = 32, kColumnsAtOnce = 16;

template <int kLanes>
struct EvenAndOdd {
  static constexpr int64_t kNumbers = 2 * kLanes;
  using Floats = typename Vectors<kLanes>::Floats;
  using Words = typename Vectors<kLanes>::Words;
  Floats even = {}, odd = {};

  // Adds numbers times a factor.
  NIBBLE_FUNCTION void add_scaled(const BFloat16* from, float factor) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    even += (Floats)(words << 16) * factor;
    odd += (Floats)(words & 0xffff0000u) * factor;
  }
  // As they are, the even ones first.
  NIBBLE_FUNCTION void load(const float* from) {
    std::memcpy(&even, from, sizeof even);
    std::memcpy(&odd, from + kLanes, sizeof odd);
  }
  NIBBLE_FUNCTION void store(float* to) const {
    std::memcpy(to, &even, sizeof even);
    std::memcpy(to + kLanes, &odd, sizeof odd);
  }
};

// Where a number lies among those that were stored as even and odd ones.
template <int kLanes>
constexpr int64_t place_of(int64_t number) {
  return number % 2 * kLanes + number / 2;
}

// Scores of `tokens` tokens of a block for one query, and of others up to a multiple of kTokensAtOnce.
template <int kLanes>
NIBBLE_FUNCTION void score_tokens(const float* query, const BFloat16* keys, int64_t size, int64_t stride,
                                  int64_t tokens, float* scores) {
  using Sums = EvenAndOdd<kLanes>;
  constexpr int kVectors = kTokensAtOnce / Sums::kNumbers;
  for (int64_t at = 0; at < tokens; at += kTokensAtOnce) {
    Sums sums[kVectors];
    for (int64_t column = 0; column < size; ++column)
      for (int i = 0; i < kVectors; ++i)
        sums[i].add_scaled(keys + column * stride + at + i * Sums::kNumbers, query[column]);
    for (int i = 0; i < kVectors; ++i) {
      float stored[Sums::kNumbers];
      sums[i].store(stored);
      for (int64_t token = 0; token < Sums::kNumbers; ++token)
        scores[at + i * Sums::kNumbers + token] = stored[place_of<kLanes>(token)];
    }
  }
}

// sums += Σ weights[token] · values[token]
template <int kLanes>
NIBBLE_FUNCTION void add_numbers(const float* weights, const BFloat16* values, int64_t tokens, int64_t size,
                                 float* sums) {
  EvenAndOdd<kLanes> total;
  total.load(sums);
  for (int64_t token = 0; token < tokens; ++token) total.add_scaled(values + token * size, weights[token]);
  total.store(sums);
}

// The same for a head, whose size is a multiple of kColumnsAtOnce.
template <int kLanes>
NIBBLE_FUNCTION void add_columns(const float* weights, const BFloat16* values, int64_t tokens, int64_t size,
                                 float* sums) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= size; column += 2 * kLanes)
    add_numbers<kLanes>(weights, values + column, tokens, size, sums + column);
  for (; column < size; column += kColumnsAtOnce)
    add_numbers<kColumnsAtOnce / 2>(weights, values + column, tokens, size, sums + column);
}

template <int kLanes>
NIBBLE_FUNCTION void divide_numbers(const float* sums, float factor, BFloat16* to) {
  for (int64_t i = 0; i < 2 * kLanes; ++i) to[i] = to_bfloat16(sums[place_of<kLanes>(i)] * factor);
}

// The sums of add_columns, in order.
template <int kLanes>
NIBBLE_FUNCTION void divide_columns(const float* sums, int64_t size, float divisor, BFloat16* to) {
  const float factor = 1.0f / divisor;
  int64_t column = 0;
  for (; column + 2 * kLanes <= size; column += 2 * kLanes) divide_numbers<kLanes>(sums + column, factor, to + column);
  for (; column < size; column += kColumnsAtOnce)
    divide_numbers<kColumnsAtOnce / 2>(sums + column, factor, to + column);
}

// For processors with registers of so many lanes; gcc chooses among these as among NIBBLE_CPU_LEVELS.
#define NIBBLE_ATTENTION_WITH(lanes, target)                                                                    \
  target inline void score_block(const float* query, const BFloat16* keys, int64_t size, int64_t stride,        \
                                 int64_t tokens, float* scores) {                                               \
    score_tokens<lanes>(query, keys, size, stride, tokens, scores);                                             \
  }                                                                                                             \
  target inline void add_values(const float* weights, const BFloat16* values, int64_t tokens, int64_t size,     \
                                float* sums) {                                                                  \
    add_columns<lanes>(weights, values, tokens, size, sums);                                                    \
  }                                                                                                             \
  target inline void divide_values(const float* sums, int64_t size, float divisor, BFloat16* to) {              \
    divide_columns<lanes>(sums, size, divisor, to);                                                             \
  }

#if NIBBLE_HAS_AVX512
NIBBLE_ATTENTION_WITH(16, [[gnu::target("arch=x86-64-v4")]])
#endif
#if NIBBLE_HAS_X86_LEVELS
NIBBLE_ATTENTION_WITH(8, [[gnu::target("arch=x86-64-v3")]])
NIBBLE_ATTENTION_WITH(4, [[gnu::target("default")]])
#else
NIBBLE_ATTENTION_WITH(4, )
#endif
#undef NIBBLE_ATTENTION_WITH

// Scores to exp(score - largest); returns their sum.
NIBBLE_CPU_LEVELS inline float exponentials(float* scores, int64_t count) {
  float largest = scores[0];
  for (int64_t i = 1; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
  float lanes[16] = {};
  int64_t at = 0;
  for (; at + 16 <= count; at += 16)
    for (int64_t i = 0; i < 16; ++i) lanes[i] += scores[at + i] = exact_exp(scores[at + i] - largest);
  for (int64_t i = 0; at + i < count; ++i) lanes[i] += scores[at + i] = exact_exp(scores[at + i] - largest);
  for (int64_t half = 8; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

NIBBLE_CPU_LEVELS inline void scale_to_float(const BFloat16* x, int64_t count, float factor, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(x[i]) * factor;
}

// One query head against tokens [first, length) of a sequence.
inline void attend(const BFloat16* query, const Cache& cache, int64_t head, int64_t size, const int32_t* blocks,
                   int64_t first, int64_t length, float scale, BFloat16* to) {
  struct Query;
  struct Scores;
  float* floats = static_cast<float*>(scratch<Query>(2 * size * sizeof(float)));
  float* sums = floats + size;
  // A block's scores are computed kTokensAtOnce at a time.
  float* scores = static_cast<float*>(scratch<Scores>((length - first + 2 * kTokensAtOnce) * sizeof(float)));
  scale_to_float(query, size, scale, floats);
  const auto for_blocks = [&](const auto& f) {
    for (int64_t token = first; token < length;) {
      const int64_t inside = token % cache.block_tokens;
      const int64_t count = std::min(cache.block_tokens - inside, length - token);
      f(blocks[token / cache.block_tokens] * cache.block_stride + head * cache.head_stride, inside, count,
        scores + token - first);
      token += count;
    }
  };
  for_blocks([&](int64_t at, int64_t inside, int64_t count, float* of_block) {
    score_block(floats, cache.keys + at + inside, size, cache.block_tokens, count, of_block);
  });
  const float sum = exponentials(scores, length - first);
  std::fill(sums, sums + size, 0.0f);
  for_blocks([&](int64_t at, int64_t inside, int64_t count, const float* of_block) {
    add_values(of_block, cache.values + at + inside * size, count, size, sums);
  });
  divide_values(sums, size, sum, to);
}

}  // namespace nibble::cpu
