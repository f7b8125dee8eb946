// The products of activations as 16-bit integers (WordRows in nvfp4_matmul.h), for the instructions of the
// file that includes this one. That file defines, in its unnamed namespace, Lanes as for
// nvfp4_matmul_floats.h and
//
//   Pairs                               what one product takes of each of 16 rows: two columns
//   Quarter, quarter_of<i>(codes)       a block's codes of four columns, decoded
//   pairs_of<odd>(quarter)              two of its columns, 2^9 times their values
//   store_pairs(p, w), load_pairs(p)
//   Sums, no_sums()                     16 integers
//   multiply_pairs(sums, w, x)          sums + w * x, with the pair x the same in every lane: exact
//   floats_of(sums)                     as Lanes
//   column_times(factor, codes, shift)  a column's values, 2^25 times factor of them, as Lanes; where it is: Rest
//   kFewOfWords, kRowsOfWords
//
// How a panel's sums get their scales is a class such as ScalesAsNumbers.
//
// Sums do not depend on the number of rows: every loop adds a panel's blocks in order, and then its rests.

#pragma once

#include "nibble/nvfp4_matmul_loops.h"

constexpr int kPairs = kBlockColumns / 2;
constexpr int64_t kDepthOfWords = 32;                             // blocks of a panel
constexpr int kPairBytes = 64, kWordBytes = kPairs * kPairBytes;  // of a block in the panel, then its scales
constexpr int kWordBlockBytes = kWordBytes + 64;

// Decoded codes are in the order of columns 0, 4, 1, 5, 2, 6, 3, 7; even bytes are one pair, odd ones the
// next.
constexpr int column_of(int pair) { return pair / 4 * 8 + pair % 2 * 4 + pair / 2 % 2 * 2; }

template <class F, int... kQuarter>
inline void for_pairs(const uint8_t* codes, const F& f, std::integer_sequence<int, kQuarter...>) {
  (
      [&] {
        const Quarter quarter = quarter_of<kQuarter>(codes);
        f(std::integral_constant<int, 2 * kQuarter>(), pairs_of<false>(quarter));
        f(std::integral_constant<int, 2 * kQuarter + 1>(), pairs_of<true>(quarter));
      }(),
      ...);
}

// Calls f(pair, weights) for the pairs of a block.
template <class F>
inline void for_pairs(const uint8_t* codes, const F& f) {
  for_pairs(codes, f, std::make_integer_sequence<int, kPairs / 2>());
}

// Calls f(pair, weights) for the pairs of a block in a panel.
template <class F>
inline void for_stored_pairs(const char* panel, const F& f) {
  [&]<int... kPair>(std::integer_sequence<int, kPair...>) {
    (f(std::integral_constant<int, kPair>(), load_pairs(panel + kPair * kPairBytes)), ...);
  }
  (std::make_integer_sequence<int, kPairs>());
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

// Adds the rests of `depth` blocks from `begin` on to rows of sums. `scales` are those blocks' scales, decoded, and
// values(rest) is the rest times its column's values, 2^25 times.
template <class F>
inline void add_rests(const Tiles& tile, const WordRows& x, int64_t count, int64_t begin, int64_t depth,
                      const float* scales, float* sums, int64_t stride, const F& values) {
  for (int64_t row = 0; row < count; ++row, sums += stride) {
    const int32_t* const first = x.first_rests + row * (tile.blocks + 1) + begin;
    const Rest *rest = x.rests[row] + first[0], *const end = x.rests[row] + first[depth];
    if (rest == end) continue;
    Lanes total = load(sums);
    for (; rest < end; ++rest) {
      total = fma(values(*rest), load(scales + (rest->block - begin) * kLaneRows), total);
    }
    store(sums, total);
  }
}

// For add_rests, from a tile's codes.
struct ColumnsOf {
  const Tiles& tile;
  Lanes operator()(const Rest& rest) const {
    return column_times(rest.value, tile.codes + rest.codes, rest.shift);
  }
};

template <int kCount>
void few_word_rows(const Tiles& tile, const WordRows& x, float* sums, int64_t stride) {
  const int64_t columns = tile.blocks * kBlockColumns;
  const uint8_t *codes = tile.codes, *scales = tile.scales;
  const int16_t* words = x.words;
  float panel_scales[kDepthOfWords * kLaneRows];
  for (int64_t begin = 0; begin < tile.blocks; begin += kDepthOfWords) {
    const int64_t depth = tile.blocks - begin < kDepthOfWords ? tile.blocks - begin : kDepthOfWords;
    Lanes total[kCount];
    for (int m = 0; m < kCount; ++m) total[m] = begin == 0 ? zero() : load(sums + m * stride);
    for (int64_t b = 0; b < depth; ++b) {
      fetch(codes, scales, b);
      Sums block[kCount];
      for (int m = 0; m < kCount; ++m) block[m] = no_sums();
      const auto rows = rows_of<kCount>(words, columns);
      for_pairs(codes, [&](auto pair, const Pairs& w) {
        for (int m = 0; m < kCount; ++m)
          block[m] = multiply_pairs(block[m], w, rows.at[m] + column_of(decltype(pair)::value));
      });
      const Lanes scale = scales_of(scales);
      store(panel_scales + b * kLaneRows, scale);
      for (int m = 0; m < kCount; ++m)
        total[m] = fma(floats_of(block[m]) * broadcast(x.scales[m * tile.blocks + begin + b]), scale, total[m]);
      codes += kBlockCodeBytes, scales += kLaneRows, words += kBlockColumns;
    }
    for (int m = 0; m < kCount; ++m) store(sums + m * stride, total[m]);
    add_rests(tile, x, kCount, begin, depth, panel_scales, sums, stride, ColumnsOf{tile});
  }
}

void few_words(const Tiles& tile, const WordRows& x, int64_t count, float* sums, int64_t stride) {
  with_count<kFewOfWords>(count, [&](auto n) { few_word_rows<decltype(n)::value>(tile, x, sums, stride); });
}

// Of a panel: kept(w, scale) are the weights as they are multiplied, stored(scale) the scales as `add` takes them, and
// add(total, block, scale, x_scale) is the total with a block's sums times both scales.
struct ScalesAsNumbers {
  static Pairs kept(Pairs w, Lanes) { return w; }
  static Lanes stored(Lanes scale) { return scale; }
  static Lanes add(Lanes total, Sums block, Lanes scale, float x_scale) {
    return fma(floats_of(block) * broadcast(x_scale), scale, total);
  }
};

template <class Scales, int kRows>
void multiply_words(const char* panel, int64_t depth, const int16_t* x, const float* x_scales, int64_t blocks,
                    bool first, float* sums, int64_t stride) {
  Lanes total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = first ? zero() : load(sums + r * stride);
  for (int64_t b = 0; b < depth; ++b, panel += kWordBlockBytes) {
    Sums block[kRows];
    for (int r = 0; r < kRows; ++r) block[r] = no_sums();
    const auto rows = rows_of<kRows>(x + b * kBlockColumns, blocks * kBlockColumns);
    for_stored_pairs(panel, [&](auto pair, const Pairs& w) {
      for (int r = 0; r < kRows; ++r)
        block[r] = multiply_pairs(block[r], w, rows.at[r] + column_of(decltype(pair)::value));
    });
    const Lanes scale = load(reinterpret_cast<const float*>(panel + kWordBytes));
    for (int r = 0; r < kRows; ++r) total[r] = Scales::add(total[r], block[r], scale, x_scales[r * blocks + b]);
  }
  for (int r = 0; r < kRows; ++r) store(sums + r * stride, total[r]);
}

template <class Scales>
void many_words(const Tiles& tiles, int64_t tile_count, const WordRows& x, int64_t count, void* panel,
                float* sums, int64_t stride) {
  char* const to = static_cast<char*>(panel);
  float panel_scales[kDepthOfWords * kLaneRows];
  for (int64_t t = 0; t < tile_count; ++t, sums += kLaneRows) {
    const Tiles tile = tiles.from(t);
    for (int64_t begin = 0; begin < tile.blocks; begin += kDepthOfWords) {
      const int64_t depth = tile.blocks - begin < kDepthOfWords ? tile.blocks - begin : kDepthOfWords;
      for (int64_t b = 0; b < depth; ++b) {
        char* const of_block = to + b * kWordBlockBytes;
        const Lanes scale = scales_of(tile.scales + (begin + b) * kLaneRows);
        for_pairs(tile.codes + (begin + b) * kBlockCodeBytes, [&](auto pair, const Pairs& w) {
          store_pairs(of_block + decltype(pair)::value * kPairBytes, Scales::kept(w, scale));
        });
        store(reinterpret_cast<float*>(of_block + kWordBytes), Scales::stored(scale));
        store(panel_scales + b * kLaneRows, scale);
      }
      for (int64_t row = 0; row < count; row += kRowsOfWords) {
        const int64_t at = row * tile.blocks + begin;
        with_count<kRowsOfWords>(count - row < kRowsOfWords ? count - row : kRowsOfWords, [&](auto n) {
          multiply_words<Scales, decltype(n)::value>(to, depth, x.words + at * kBlockColumns, x.scales + at,
                                                     tile.blocks, begin == 0, sums + row * stride, stride);
        });
      }
      add_rests(tile, x, count, begin, depth, panel_scales, sums, stride, [&](const Rest& rest) {
        return stored_column_times(rest.value, to + (rest.block - begin) * kWordBlockBytes + rest.pair / 2 * kPairBytes,
                                   rest.pair % 2);
      });
    }
  }
}

constexpr WordLoops kWordLoops = {kFewOfWords, kDepthOfWords* kWordBlockBytes, few_words,
                                  many_words<ScalesAsNumbers>, false};
