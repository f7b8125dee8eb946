// A single row of words (nvfp4_matmul_words.h) as digits: words are 256 times a byte plus a byte. Products with bytes
// take the weights as they are decoded, so one row needs fewer instructions than with words; two or more rows do not.
// The file that includes this one defines
//
//   multiply_bytes(sums, w, p)          as for nvfp4_row_groups.h; first_bytes(w, p): for sums of zero
//   combined(high, low)                 256 * high + low, as Sums
//
// Weights are decoded as twice their value + 12; x's corrections take the 12 away, exactly.

#include "nibble/nvfp4_matmul_words.h"

void one_word_row(const Tiles& tile, const WordRows& x, float* sums) {
  const uint8_t *codes = tile.codes, *scales = tile.scales;
  const int8_t* digits = x.digits;
  const DigitScale* digit_scales = x.digit_scales;
  float panel_scales[kDepthOfWords * kLaneRows];
  for (int64_t begin = 0; begin < tile.blocks; begin += kDepthOfWords) {
    const int64_t depth = tile.blocks - begin < kDepthOfWords ? tile.blocks - begin : kDepthOfWords;
    Lanes total = begin == 0 ? zero() : load(sums);
    for (int64_t b = 0; b < depth; ++b) {
      fetch(codes, scales, b);
      const int8_t *const high_digits = digits, *const low_digits = digits + kBlockColumns;
      const Bytes w0 = bytes_of<0>(codes);
      Bytes high = first_bytes(w0, high_digits), low = first_bytes(w0, low_digits);
      const Bytes w1 = bytes_of<1>(codes);
      high = multiply_bytes(high, w1, high_digits + 4), low = multiply_bytes(low, w1, low_digits + 4);
      const Bytes w2 = bytes_of<2>(codes);
      high = multiply_bytes(high, w2, high_digits + 8), low = multiply_bytes(low, w2, low_digits + 8);
      const Bytes w3 = bytes_of<3>(codes);
      high = multiply_bytes(high, w3, high_digits + 12), low = multiply_bytes(low, w3, low_digits + 12);
      const Lanes dot = fma(floats_of(combined(high, low)), broadcast(digit_scales->scale),
                            broadcast(digit_scales->correction));
      const Lanes scale = scales_of(scales);
      store(panel_scales + b * kLaneRows, scale);
      total = fma(dot, scale, total);
      codes += kBlockCodeBytes, scales += kLaneRows, digits += 2 * kBlockColumns, ++digit_scales;
    }
    store(sums, total);
    add_rests(tile, x, 1, begin, depth, panel_scales, sums, 0, ColumnsOf{tile});
  }
}

void one_or_few_words(const Tiles& tile, const WordRows& x, int64_t count, float* sums, int64_t stride) {
  if (count == 1 && x.digits) return one_word_row(tile, x, sums);
  few_words(tile, x, count, sums, stride);
}

constexpr WordLoops loops_with_digits(decltype(WordLoops::many) many) {
  return {kWordLoops.few_rows, kWordLoops.panel_bytes, one_or_few_words, many, true};
}
