// word_rows.h: a block of x as integers times a power of two, and what they lack.
#include "nibble/word_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

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

// Half a block. With arrays gcc 12 makes scalar code of a whole one.
constexpr int kHalf = kBlockColumns / 2;
typedef float Floats [[gnu::vector_size(4 * kHalf)]];
typedef int32_t Integers [[gnu::vector_size(4 * kHalf)]];
typedef int16_t Words [[gnu::vector_size(2 * kHalf)]];
typedef uint64_t Eights [[gnu::vector_size(4 * kHalf)]];

// Words toward zero, and what they lack; returns a bit for each word that lacks something.
NIBBLE_FUNCTION uint32_t divide_block(const float* x, int scale, int16_t* words, float* rest) {
  const float unit = power_of_two(scale), inverse = power_of_two(-scale);
  Integers bits = {1, 2, 4, 8, 16, 32, 64, 128}, lacking = {};
  for (int half = 0; half < 2; ++half, x += kHalf, words += kHalf, rest += kHalf, bits <<= kHalf) {
    Floats of_x;
    std::memcpy(&of_x, x, sizeof of_x);
    const Integers whole = __builtin_convertvector(of_x * inverse, Integers);
    const Words of_words = __builtin_convertvector(whole, Words);
    const Floats lacks = of_x - __builtin_convertvector(whole, Floats) * unit;
    lacking |= (lacks != 0.0f) & bits;
    std::memcpy(words, &of_words, sizeof of_words);
    std::memcpy(rest, &lacks, sizeof lacks);
  }
  const Eights two = reinterpret_cast<Eights>(lacking);
  const uint64_t both = (two[0] | two[1]) | (two[2] | two[3]);
  return static_cast<uint32_t>(both | both >> 32);
}

// The same in float64.
uint32_t divide_small_block(const float* x, int scale, int16_t* words, float* rest) {
  uint32_t lacking = 0;
  for (int64_t i = 0; i < kBlockColumns; ++i) {
    words[i] = static_cast<int16_t>(std::ldexp(static_cast<double>(x[i]), -scale));
    rest[i] = static_cast<float>(x[i] - std::ldexp(static_cast<double>(words[i]), scale));
    lacking |= static_cast<uint32_t>(rest[i] != 0.0f) << i;
  }
  return scale > kLeastScale ? lacking : 0;
}

struct Divided {
  float scale;
  uint32_t lacking;
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
    const uint32_t lacking = divide_block(x, scale, words, rest);
    return {power_of_two(scale) * kWordFactor, lacking};
  }
  const int least =
      std::max(largest ? std::ilogb(std::bit_cast<float>(largest)) + 1 - kWordBits : 0, kLeastScale);
  const uint32_t lacking = divide_small_block(x, least, words, rest);
  return {static_cast<float>(std::ldexp(static_cast<double>(kWordFactor), least)), lacking};
}

enum class Row { kWhole, kLacking, kNotFinite };

// `lacking`: of each block, a bit for each word that lacks something.
NIBBLE_CPU_LEVELS Row divide_row(const float* x, int64_t blocks, int16_t* words, float* scales, uint8_t& has_tiny,
                                 uint32_t* lacking, float* rest) {
  Row row = Row::kWhole;
  for (int64_t b = 0; b < blocks; ++b, x += kBlockColumns, words += kBlockColumns, rest += kBlockColumns) {
    const uint32_t largest = largest_magnitude(x);
    if (largest >= kInfinity) return Row::kNotFinite;
    const Divided divided = divide(x, largest, words, rest);
    scales[b] = divided.scale;
    has_tiny |= divided.scale < kLeastWordScale;
    lacking[b] = divided.lacking;
    if (divided.lacking) row = Row::kLacking;
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

// In the four bytes of a row's eight codes, columns are in the order 0, 2, 4, 6, 1, 3, 5, 7.
Rest rest_at(int64_t block, int column, float lacking) {
  const int64_t codes = block * kBlockCodeBytes + column / 8 * (kBlockCodeBytes / 2);
  const int shift = 4 * (column % 8 / 2 + column % 2 * 4);
  const int pair = column / 8 * 4 + column / 4 % 2 + column % 4 / 2 * 2;
  return {static_cast<int32_t>(block), static_cast<int32_t>(codes), static_cast<int16_t>(shift),
          static_cast<int16_t>(2 * pair + column % 2), lacking * kRestFactor};
}

}  // namespace

void OwnedWordRows::allocate(int64_t rows, int64_t columns, bool with_digits) {
  columns_ = columns;
  if (with_digits) {
    digits_.resize(2 * columns);
    digit_scales_.resize(columns / kBlockColumns);
  }
  words_.resize(rows * columns);
  has_tiny_.resize(rows);
  scales_.resize(rows * columns / kBlockColumns);
  rest_of_rows_.resize(rows);
  first_rests_.assign(rows * (columns / kBlockColumns + 1), 0);
  rests_.resize(rows);
}

bool OwnedWordRows::set(int64_t row, const float* x) {
  thread_local std::vector<float> rest;
  thread_local std::vector<uint32_t> lacking;
  const int64_t blocks = columns_ / kBlockColumns;
  rest.resize(columns_);
  lacking.resize(blocks);
  int16_t* words = words_.data() + row * columns_;
  float* scales = scales_.data() + row * blocks;
  has_tiny_[row] = false;
  switch (divide_row(x, blocks, words, scales, has_tiny_[row], lacking.data(), rest.data())) {
    case Row::kWhole:
      break;
    case Row::kLacking:
      set_rests(row, lacking, rest);
      break;
    default:
      std::fill(words, words + columns_, int16_t{0});
      std::fill(scales, scales + blocks, kWordFactor);
      return false;
  }
  has_digits_ = !digits_.empty() && divide_words(words, scales, blocks, digits_.data(), digit_scales_.data());
  return true;
}

void OwnedWordRows::set_rests(int64_t row, const std::vector<uint32_t>& lacking, const std::vector<float>& rest) {
  std::vector<Rest>& rests = rests_[row];
  const int64_t blocks = columns_ / kBlockColumns;
  int32_t* first = first_rests_.data() + row * (blocks + 1);
  for (int64_t b = 0; b < blocks; ++b) {
    for (uint32_t left = lacking[b]; left != 0; left &= left - 1)
      rests.push_back(rest_at(b, std::countr_zero(left), rest[b * kBlockColumns + std::countr_zero(left)]));
    first[b + 1] = static_cast<int32_t>(rests.size());
  }
  rest_of_rows_[row] = rests.data();
}

}  // namespace nibble::cpu
