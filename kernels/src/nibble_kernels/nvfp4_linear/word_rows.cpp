// word_rows.h: a block of x as integers times a power of two, and what they lack.
#include "nibble/word_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "nibble/arch.h"

namespace nibble::cpu {
namespace {

constexpr int kWordBits = 15;  // of a word's magnitude
// Scales times kWordFactor are float32, subnormal ones too; what is smaller than they are is left out.
constexpr int kLeastScale = -148;
// Words above do not have digits. A BF16 number of the largest significand would be above, so its exponent counts as the
// next one.
constexpr int16_t kMostOfDigits = 127 * 256 + 127;
constexpr float kMostOfDigitScales = 0x1p96f;  // corrections are finite
constexpr uint32_t kLastOfSignificand = 1 << 16;
// Of a block's largest value: down to here, scales and their reciprocals are normal numbers.
constexpr int kLeastPlain = -60;
constexpr uint32_t kInfinity = 0x7f800000;

NIBBLE_FUNCTION float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23);
}

// Words toward zero, and what they lack; returns whether they lack anything.
NIBBLE_FUNCTION bool divide_block(const float* x, int scale, int16_t* words, float* rest) {
  const float unit = power_of_two(scale), inverse = power_of_two(-scale);
  uint32_t lacking = 0;
  for (int64_t i = 0; i < kBlockColumns; ++i) {
    const int32_t word = static_cast<int32_t>(x[i] * inverse);
    words[i] = static_cast<int16_t>(word);
    rest[i] = x[i] - static_cast<float>(word) * unit;
    lacking |= std::bit_cast<uint32_t>(rest[i]) << 1;
  }
  return lacking != 0;
}

// The same in float64.
bool divide_small_block(const float* x, int scale, int16_t* words, float* rest) {
  bool lacks = false;
  for (int64_t i = 0; i < kBlockColumns; ++i) {
    words[i] = static_cast<int16_t>(std::ldexp(static_cast<double>(x[i]), -scale));
    rest[i] = static_cast<float>(x[i] - std::ldexp(static_cast<double>(words[i]), scale));
    lacks |= rest[i] != 0.0f;
  }
  return lacks && scale > kLeastScale;
}

struct Divided {
  float scale;
  bool lacks;
};

NIBBLE_FUNCTION uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kBlockColumns; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffff);
  return largest;
}

// `largest` is the bits of a finite magnitude.
NIBBLE_FUNCTION Divided divide(const float* x, uint32_t largest, int16_t* words, float* rest) {
  const int exponent = static_cast<int>((largest + kLastOfSignificand) >> 23) - 127, scale = exponent + 1 - kWordBits;
  if (exponent >= kLeastPlain) {
    const bool lacks = divide_block(x, scale, words, rest);
    return {power_of_two(scale) * kWordFactor, lacks};
  }
  const int least =
      std::max(largest ? std::ilogb(std::bit_cast<float>(largest)) + 1 - kWordBits : 0, kLeastScale);
  const bool lacks = divide_small_block(x, least, words, rest);
  return {static_cast<float>(std::ldexp(static_cast<double>(kWordFactor), least)), lacks};
}

enum class Row { kWhole, kLacking, kNotFinite };

NIBBLE_CPU_LEVELS Row divide_row(const float* x, int64_t blocks, int16_t* words, float* scales, float* rest) {
  Row row = Row::kWhole;
  for (int64_t b = 0; b < blocks; ++b, x += kBlockColumns, words += kBlockColumns, rest += kBlockColumns) {
    const uint32_t largest = largest_magnitude(x);
    if (largest >= kInfinity) return Row::kNotFinite;
    const Divided divided = divide(x, largest, words, rest);
    scales[b] = divided.scale;
    if (divided.lacks) {
      row = Row::kLacking;
    } else {
      std::fill(rest, rest + kBlockColumns, 0.0f);
    }
  }
  return row;
}

// Words as digits, in the order of decoded codes: of eight columns 0, 4, 1, 5, 2, 6, 3, 7. False if they do not fit.
NIBBLE_CPU_LEVELS bool divide_words(const int16_t* words, const float* scales, int64_t blocks, int8_t* digits,
                                    DigitScale* digit_scales) {
  int16_t most = 0;
  for (int64_t i = 0; i < blocks * kBlockColumns; ++i) most = std::max(most, words[i]);
  if (most > kMostOfDigits) return false;
  for (int64_t b = 0; b < blocks; ++b, words += kBlockColumns, digits += 2 * kBlockColumns) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kBlockColumns; ++i) {
      const int16_t word = words[i / 8 * 8 + i % 2 * 4 + i % 8 / 2];
      const int8_t low = static_cast<int8_t>(word);
      digits[i] = static_cast<int8_t>((word - low) / 256);
      digits[kBlockColumns + i] = low;
      sum += word;
    }
    const float scale = scales[b] * 256.0f;
    if (scale > kMostOfDigitScales) return false;
    digit_scales[b] = {scale, static_cast<float>(-12 * sum) * scale};
  }
  return true;
}

}  // namespace

void OwnedWordRows::allocate(int64_t rows, int64_t columns, bool with_digits) {
  columns_ = columns;
  if (with_digits) {
    digits_.resize(2 * columns);
    digit_scales_.resize(columns / kBlockColumns);
  }
  words_.resize(rows * columns);
  scales_.resize(rows * columns / kBlockColumns);
  rest_of_rows_.resize(rows);
  first_rests_.assign(rows * (columns / kBlockColumns + 1), 0);
  rests_.resize(rows);
}

bool OwnedWordRows::set(int64_t row, const float* x) {
  thread_local std::vector<float> rest;
  rest.resize(columns_);
  const int64_t blocks = columns_ / kBlockColumns;
  int16_t* words = words_.data() + row * columns_;
  float* scales = scales_.data() + row * blocks;
  switch (divide_row(x, blocks, words, scales, rest.data())) {
    case Row::kWhole:
      break;
    case Row::kLacking:
      set_rests(row, rest);
      break;
    default:
      std::fill(words, words + columns_, int16_t{0});
      std::fill(scales, scales + blocks, 0.0f);
      return false;
  }
  has_digits_ = !digits_.empty() && divide_words(words, scales, blocks, digits_.data(), digit_scales_.data());
  return true;
}

void OwnedWordRows::set_rests(int64_t row, const std::vector<float>& rest) {
  std::vector<Rest>& rests = rests_[row];
  const int64_t blocks = columns_ / kBlockColumns;
  int32_t* first = first_rests_.data() + row * (blocks + 1);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t column = b * kBlockColumns; column < (b + 1) * kBlockColumns; ++column)
      if (rest[column] != 0.0f) rests.push_back({static_cast<int32_t>(column), rest[column] * kRestFactor});
    first[b + 1] = static_cast<int32_t>(rests.size());
  }
  rest_of_rows_[row] = rests.data();
}

}  // namespace nibble::cpu
