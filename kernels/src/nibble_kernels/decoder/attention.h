// Attention of new tokens to a paged cache in BF16: keys [block][kv head][head size][tokens of a block],
// values [block][kv head][tokens of a block][head size], as vLLM's CPU backend stores them without AMX.
#pragma once

#include <utility>

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

  NIBBLE_FUNCTION static EvenAndOdd of(const BFloat16* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
  }
  // Adds numbers times a factor.
  NIBBLE_FUNCTION void add_scaled(const EvenAndOdd& numbers, float factor) {
    even += numbers.even * factor;
    odd += numbers.odd * factor;
  }
  NIBBLE_FUNCTION void add_scaled(const BFloat16* from, float factor) { add_scaled(of(from), factor); }
  // As they are, the even ones first.
  NIBBLE_FUNCTION void load(const float* from) {
    std::memcpy(&even, from, sizeof even);
    std::memcpy(&odd, from + kLanes, sizeof odd);
  }
  NIBBLE_FUNCTION void store(float* to) const {
    std::memcpy(to, &even, sizeof even);
    std::memcpy(to + kLanes, &odd, sizeof odd);
  }
  // In order.
  template <int... kPlace>
  NIBBLE_FUNCTION void store_in_order(float* to, std::integer_sequence<int, kPlace...>) const {
    const Floats low = __builtin_shufflevector(even, odd, (kPlace % 2 * kLanes + kPlace / 2)...);
    const Floats high =
        __builtin_shufflevector(even, odd, (kPlace % 2 * kLanes + (kLanes + kPlace) / 2)...);
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + kLanes, &high, sizeof high);
  }
  NIBBLE_FUNCTION void store_in_order(float* to) const {
    store_in_order(to, std::make_integer_sequence<int, kLanes>());
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

// Of a prompt, so many queries at once: keys and values are converted once for them. Sums are those of one query.
constexpr int64_t kQueriesAtOnce = 4;

// As score_tokens, for queries [kQueriesAtOnce][size] and scores `stride_of_scores` apart.
template <int kLanes>
NIBBLE_FUNCTION void score_tokens_of_rows(const float* queries, const BFloat16* keys, int64_t size, int64_t stride,
                                          int64_t tokens, float* scores, int64_t stride_of_scores) {
  using Sums = EvenAndOdd<kLanes>;
  for (int64_t at = 0; at < tokens; at += Sums::kNumbers) {
    Sums sums[kQueriesAtOnce];
    for (int64_t column = 0; column < size; ++column) {
      const Sums numbers = Sums::of(keys + column * stride + at);
      for (int64_t row = 0; row < kQueriesAtOnce; ++row) sums[row].add_scaled(numbers, queries[row * size + column]);
    }
    for (int64_t row = 0; row < kQueriesAtOnce; ++row) sums[row].store_in_order(scores + row * stride_of_scores + at);
  }
}

// As add_numbers, for weights `stride` apart and sums [kQueriesAtOnce][size].
template <int kLanes>
NIBBLE_FUNCTION void add_numbers_of_rows(const float* weights, int64_t stride, const BFloat16* values, int64_t tokens,
                                         int64_t size, float* sums) {
  static_assert(kQueriesAtOnce == 4);  // of the unrolled loops, whose sums stay in registers
  EvenAndOdd<kLanes> totals[kQueriesAtOnce];
#pragma GCC unroll 4
  for (int64_t row = 0; row < kQueriesAtOnce; ++row) totals[row].load(sums + row * size);
  for (int64_t token = 0; token < tokens; ++token) {
    const auto numbers = EvenAndOdd<kLanes>::of(values + token * size);
#pragma GCC unroll 4
    for (int64_t row = 0; row < kQueriesAtOnce; ++row) totals[row].add_scaled(numbers, weights[row * stride + token]);
  }
#pragma GCC unroll 4
  for (int64_t row = 0; row < kQueriesAtOnce; ++row) totals[row].store(sums + row * size);
}

template <int kLanes>
NIBBLE_FUNCTION void add_columns_of_rows(const float* weights, int64_t stride, const BFloat16* values, int64_t tokens,
                                         int64_t size, float* sums) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= size; column += 2 * kLanes)
    add_numbers_of_rows<kLanes>(weights, stride, values + column, tokens, size, sums + column);
  for (; column < size; column += kColumnsAtOnce)
    add_numbers_of_rows<kColumnsAtOnce / 2>(weights, stride, values + column, tokens, size, sums + column);
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
  target inline void score_block_of_rows(const float* queries, const BFloat16* keys, int64_t size,              \
                                         int64_t stride, int64_t tokens, float* scores,                         \
                                         int64_t stride_of_scores) {                                            \
    score_tokens_of_rows<lanes>(queries, keys, size, stride, tokens, scores, stride_of_scores);                 \
  }                                                                                                             \
  target inline void add_values_of_rows(const float* weights, int64_t stride, const BFloat16* values,           \
                                        int64_t tokens, int64_t size, float* sums) {                            \
    add_columns_of_rows<lanes>(weights, stride, values, tokens, size, sums);                                    \
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

// kQueriesAtOnce tokens of a prompt, which follow one another; the first sees `length` tokens, or the last `window` of
// them. Queries and results of a token lie `query_stride` and `stride` apart.
inline void attend_rows(const BFloat16* queries, int64_t query_stride, const Cache& cache, int64_t head, int64_t size,
                        const int32_t* blocks, int64_t length, int64_t window, float scale, BFloat16* to,
                        int64_t stride) {
  struct Queries;
  struct Scores;
  float* floats = static_cast<float*>(scratch<Queries>(2 * kQueriesAtOnce * size * sizeof(float)));
  float* sums = floats + kQueriesAtOnce * size;
  for (int64_t row = 0; row < kQueriesAtOnce; ++row)
    scale_to_float(queries + row * query_stride, size, scale, floats + row * size);
  const auto first_of = [&](int64_t row) {
    return window > 0 ? std::max<int64_t>(0, length + row - window) : int64_t{0};
  };
  // From the beginning of a block on.
  const int64_t begin = first_of(0) / cache.block_tokens * cache.block_tokens, end = length + kQueriesAtOnce - 1;
  const int64_t scores_stride = end - begin + 2 * kTokensAtOnce;
  float* scores = static_cast<float*>(scratch<Scores>(kQueriesAtOnce * scores_stride * sizeof(float)));
  const auto for_blocks = [&](const auto& f) {
    for (int64_t token = begin; token < end; token += cache.block_tokens)
      f(blocks[token / cache.block_tokens] * cache.block_stride + head * cache.head_stride,
        std::min(cache.block_tokens, end - token), scores + token - begin);
  };
  for_blocks([&](int64_t at, int64_t count, float* of_block) {
    score_block_of_rows(floats, cache.keys + at, size, cache.block_tokens, count, of_block, scores_stride);
  });
  float divisors[kQueriesAtOnce];
  for (int64_t row = 0; row < kQueriesAtOnce; ++row) {
    float* const own = scores + row * scores_stride;
    const int64_t seen = first_of(row) - begin, unseen = length + row - begin;
    divisors[row] = exponentials(own + seen, unseen - seen);
    std::fill(own, own + seen, 0.0f);
    std::fill(own + unseen, own + (end - begin), 0.0f);
  }
  std::fill(sums, sums + kQueriesAtOnce * size, 0.0f);
  for_blocks([&](int64_t at, int64_t count, const float* of_block) {
    add_values_of_rows(of_block, scores_stride, cache.values + at, count, size, sums);
  });
  for (int64_t row = 0; row < kQueriesAtOnce; ++row)
    divide_values(sums + row * size, size, divisors[row], to + row * stride);
}

}  // namespace nibble::cpu
