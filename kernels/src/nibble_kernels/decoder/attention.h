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

// Vectors that stay in registers over a loop.
typedef float Floats16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves16 __attribute__((vector_size(32), aligned(2)));
typedef uint32_t Words16 __attribute__((vector_size(64), aligned(4)));

constexpr int64_t kTokensAtOnce = 32, kColumnsAtOnce = 16;

// Sixteen BF16 numbers times a factor, added to sums.
NIBBLE_FUNCTION void add_scaled(const BFloat16* from, float factor, Floats16& sums) {
  Halves16 halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words16 words = __builtin_convertvector(halves, Words16) << 16;
  Floats16 floats;
  std::memcpy(&floats, &words, sizeof floats);
  sums += floats * factor;
}

// Scores of `tokens` tokens of a block for one query, and of others up to a multiple of kTokensAtOnce.
NIBBLE_CPU_LEVELS inline void score_block(const float* query, const BFloat16* keys, int64_t size, int64_t stride,
                                          int64_t tokens, float* scores) {
  for (int64_t at = 0; at < tokens; at += kTokensAtOnce) {
    Floats16 low = {}, high = {};
    for (int64_t column = 0; column < size; ++column) {
      const BFloat16* from = keys + column * stride + at;
      add_scaled(from, query[column], low);
      add_scaled(from + 16, query[column], high);
    }
    std::memcpy(scores + at, &low, sizeof low);
    std::memcpy(scores + at + 16, &high, sizeof high);
  }
}

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

// sums += Σ weights[token] · values[token], for a head size that is a multiple of kColumnsAtOnce.
NIBBLE_CPU_LEVELS inline void add_values(const float* weights, const BFloat16* values, int64_t tokens, int64_t size,
                                         float* sums) {
  for (int64_t column = 0; column < size; column += kColumnsAtOnce) {
    Floats16 total;
    std::memcpy(&total, sums + column, sizeof total);
    for (int64_t token = 0; token < tokens; ++token)
      add_scaled(values + token * size + column, weights[token], total);
    std::memcpy(sums + column, &total, sizeof total);
  }
}

NIBBLE_CPU_LEVELS inline void scale_to_float(const BFloat16* x, int64_t count, float factor, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(x[i]) * factor;
}

NIBBLE_CPU_LEVELS inline void divide(const float* x, int64_t count, float divisor, BFloat16* to) {
  const float factor = 1.0f / divisor;
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(x[i] * factor);
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
  divide(sums, size, sum, to);
}

}  // namespace nibble::cpu
