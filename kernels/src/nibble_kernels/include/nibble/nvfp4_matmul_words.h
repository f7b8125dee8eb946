// The products of activations as 16-bit integers (WordRows in nvfp4_matmul.h), for the instructions of the
// file that includes this one. That file defines, in its unnamed namespace, Lanes as for
// nvfp4_matmul_floats.h and
//
//   Pairs                               what one product takes of each of 16 rows: two columns
//   Quarter, quarter_of<i>(codes)       a block's codes of four columns, decoded
//   pairs_of<odd>(quarter)              two of its columns, kPairFactor times their values
//   store_pairs(p, w), load_pairs(p)
//   Sums, no_sums()                     16 integers
//   multiply_pairs(sums, w, x)          sums + w · x, with the pair x the same in every lane: exact
//   floats_of(sums)                     as Lanes
//   kFewOfWords, kRowsOfWords, kDepthOfWords (blocks of a panel)

#include "nibble/nvfp4_matmul_loops.h"

constexpr int kPairs = kBlockColumns / 2;
constexpr int kPairBytes = 64, kWordBytes = kPairs * kPairBytes;  // of a block in the panel, then its scales
constexpr int kWordBlockBytes = kWordBytes + 64;

// Where the pair is in a block of x: the order of decoded codes (columns 0, 4, 1, 5, 2, 6, 3, 7) by even and
// odd bytes.
constexpr int column_of(int pair) {
  return pair / 4 * 8 + (pair % 4 == 0 ? 0 : pair % 4 == 1 ? 4 : pair % 4 == 2 ? 2 : 6);
}

template <class F, int... kPair>
inline void for_pairs(const uint8_t* codes, const F& f, std::integer_sequence<int, kPair...>) {
  (
      [&] {
        const Quarter quarter = quarter_of<kPair>(codes);
        f(std::integral_constant<int, 2 * kPair>(), pairs_of<false>(quarter));
        f(std::integral_constant<int, 2 * kPair + 1>(), pairs_of<true>(quarter));
      }(),
      ...);
}

// Calls f(pair, weights) for the pairs of a block.
template <class F>
inline void for_pairs(const uint8_t* codes, const F& f) {
  for_pairs(codes, f, std::make_integer_sequence<int, kPairs / 2>());
}

// Where a block of each row is, one register each: gcc would keep an address for each pair, in memory.
template <int kCount>
struct RowsOfWords {
  const int16_t* at[kCount];
};
template <int kCount>
inline RowsOfWords<kCount> rows_of(const int16_t* words, int64_t columns) {
  RowsOfWords<kCount> rows;
  for (int m = 0; m < kCount; ++m) {
    rows.at[m] = words + m * columns;
    asm("" : "+r"(rows.at[m]));
  }
  return rows;
}

// Calls f(pair, weights) for the pairs of a block in a panel.
template <class F>
inline void for_stored_pairs(const char* panel, const F& f) {
  [&]<int... kPair>(std::integer_sequence<int, kPair...>) {
    (f(std::integral_constant<int, kPair>(), load_pairs(panel + kPair * kPairBytes)), ...);
  }
  (std::make_integer_sequence<int, kPairs>());
}

// What is left of a block of x after its first part. Apart from the loops, which keep what they decode in
// registers.
template <bool kStored, class Byte>
[[gnu::noinline]] Lanes add_more(const WordPart* part, const Byte* weights, Lanes scale, Lanes total) {
  for (; part; part = part->more) {
    Sums sums = no_sums();
    const auto add = [&](auto pair, const Pairs& w) {
      sums = multiply_pairs(sums, w, part->words + column_of(decltype(pair)::value));
    };
    if constexpr (kStored) {
      for_stored_pairs(weights, add);
    } else {
      for_pairs(weights, add);
    }
    total = fma(floats_of(sums) * broadcast(part->scale), scale, total);
  }
  return total;
}

template <int kCount>
void few_word_rows(const Tiles& tile, const WordRows& x, float* sums, int64_t stride) {
  const int64_t columns = tile.blocks * kBlockColumns;
  const uint8_t *codes = tile.codes, *scales = tile.scales;
  const int16_t* words = x.words;
  Lanes total[kCount];
  for (int m = 0; m < kCount; ++m) total[m] = zero();
  for (int64_t b = 0; b < tile.blocks; ++b) {
    fetch(codes, scales, b);
    Sums block[kCount];
    for (int m = 0; m < kCount; ++m) block[m] = no_sums();
    const auto rows = rows_of<kCount>(words, columns);
    for_pairs(codes, [&](auto pair, const Pairs& w) {
      for (int m = 0; m < kCount; ++m)
        block[m] = multiply_pairs(block[m], w, rows.at[m] + column_of(decltype(pair)::value));
    });
    const Lanes scale = scales_of(scales);
    for (int m = 0; m < kCount; ++m) {
      const int64_t at = m * tile.blocks + b;
      total[m] = fma(floats_of(block[m]) * broadcast(x.scales[at]), scale, total[m]);
      if (x.more[at]) [[unlikely]]
        total[m] = add_more<false>(x.more[at], codes, scale, total[m]);
    }
    codes += kBlockCodeBytes, scales += kLaneRows, words += kBlockColumns;
  }
  for (int m = 0; m < kCount; ++m) store(sums + m * stride, total[m]);
}

void few_words(const Tiles& tile, const WordRows& x, int64_t count, float* sums, int64_t stride) {
  with_count<kFewOfWords>(count, [&](auto n) { few_word_rows<decltype(n)::value>(tile, x, sums, stride); });
}

template <int kRows>
void multiply_words(const char* panel, int64_t depth, const WordRows& x, int64_t blocks, bool first,
                    float* sums, int64_t stride) {
  Lanes total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = first ? zero() : load(sums + r * stride);
  for (int64_t b = 0; b < depth; ++b, panel += kWordBlockBytes) {
    Sums block[kRows];
    for (int r = 0; r < kRows; ++r) block[r] = no_sums();
    const auto rows = rows_of<kRows>(x.words + b * kBlockColumns, blocks * kBlockColumns);
    for_stored_pairs(panel, [&](auto pair, const Pairs& w) {
      for (int r = 0; r < kRows; ++r)
        block[r] = multiply_pairs(block[r], w, rows.at[r] + column_of(decltype(pair)::value));
    });
    const Lanes scale = load(reinterpret_cast<const float*>(panel + kWordBytes));
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * blocks + b;
      total[r] = fma(floats_of(block[r]) * broadcast(x.scales[at]), scale, total[r]);
      if (x.more[at]) [[unlikely]]
        total[r] = add_more<true>(x.more[at], panel, scale, total[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) store(sums + r * stride, total[r]);
}

void many_words(const Tiles& tiles, int64_t tile_count, const WordRows& x, int64_t count, void* panel,
                float* sums, int64_t stride) {
  char* const to = static_cast<char*>(panel);
  for (int64_t t = 0; t < tile_count; ++t, sums += kLaneRows) {
    const Tiles tile = tiles.from(t);
    for (int64_t begin = 0; begin < tile.blocks; begin += kDepthOfWords) {
      const int64_t depth = tile.blocks - begin < kDepthOfWords ? tile.blocks - begin : kDepthOfWords;
      for (int64_t b = 0; b < depth; ++b) {
        char* const of_block = to + b * kWordBlockBytes;
        for_pairs(tile.codes + (begin + b) * kBlockCodeBytes, [&](auto pair, const Pairs& w) {
          store_pairs(of_block + decltype(pair)::value * kPairBytes, w);
        });
        store(reinterpret_cast<float*>(of_block + kWordBytes),
              scales_of(tile.scales + (begin + b) * kLaneRows));
      }
      for (int64_t row = 0; row < count; row += kRowsOfWords) {
        const int64_t at = row * tile.blocks + begin;
        const WordRows part{x.words + at * kBlockColumns, x.scales + at, x.more + at};
        with_count<kRowsOfWords>(count - row < kRowsOfWords ? count - row : kRowsOfWords, [&](auto n) {
          multiply_words<decltype(n)::value>(to, depth, part, tile.blocks, begin == 0, sums + row * stride,
                                             stride);
        });
      }
    }
  }
}

constexpr WordLoops kWordLoops = {kFewOfWords, kDepthOfWords* kWordBlockBytes, few_words, many_words};
