// nibble::nvfp4_quantize_weight and nibble::largest_magnitude on the CPU: reference.py with vector
// instructions.
#include "nibble/cpu.h"
#include "weight_quant/rows.h"

namespace nibble::cpu {
namespace {

constexpr float kE2m1Max = 6.0f, kE4m3Max = 448.0f, kE4m3MaxFourOverSix = 256.0f;
constexpr float kMinScale = 0x1p-9f, kLeastAmax = 1e-38f;
constexpr int64_t kPairs = kBlock / 2;

NIBBLE_FUNCTION uint8_t scale_of(float wanted) {
  wanted = wanted == 0.0f ? 1.0f : wanted;
  wanted = wanted < kMinScale ? kMinScale : wanted;
  return static_cast<uint8_t>(e4m3_encode(minimum(wanted, kE4m3Max)));
}

// + 0.0f makes -0 to 0, as ModelOpt does.
NIBBLE_FUNCTION void divide_and_encode(const float* x, float divisor, uint32_t* codes) {
  float scaled[kBlock];
  for (uint32_t i = 0; i < kBlock; ++i) scaled[i] = x[i] / divisor + 0.0f;
  encode_block(scaled, 1.0f, codes);
}

NIBBLE_CPU_LEVELS void largest_of_blocks(const float* x, int64_t blocks, float* largest) {
  for (int64_t block = 0; block < blocks; ++block) largest[block] = block_amax(x + block * kBlock);
}

NIBBLE_CPU_LEVELS void scales_for_six(const float* largest, int64_t blocks, float divisor, uint8_t* scales) {
  for (int64_t block = 0; block < blocks; ++block) scales[block] = scale_of(largest[block] / divisor);
}

NIBBLE_CPU_LEVELS void encode_six(const float* x, const uint8_t* scales, int64_t blocks, float global_scale,
                                  uint8_t* packed) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, packed += kBlock / 2) {
    uint32_t codes[kBlock];
    divide_and_encode(x, e4m3_decode(scales[block]) * global_scale, codes);
    pack_block(codes, packed);
  }
}

// ModelOpt's order of operations for calibrated blocks.
NIBBLE_CPU_LEVELS void scales_for(const float* largest, int64_t blocks, float factor, float sixth,
                                  uint8_t* scales) {
  for (int64_t block = 0; block < blocks; ++block)
    scales[block] = scale_of(largest[block] * factor / kE2m1Max * kE4m3MaxFourOverSix / sixth);
}

// A block's values. Compilers make instructions of these that loops over arrays do not get.
typedef float Floats __attribute__((vector_size(64)));
typedef float HalfFloats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));

NIBBLE_FUNCTION Floats decoded(Words codes) {
  const Words index = codes & 7, sign = (codes & 8) << 28;
  const Words bits = index < 2 ? index * 0x3f000000 : 0x3f000000 + (index << 22);
  const Words all = sign | bits;
  Floats values;
  std::memcpy(&values, &all, sizeof values);
  return values;
}

// The codes of blocks, and the sums of each two squares of a block's errors.
NIBBLE_CPU_LEVELS void encode_with_errors(const float* x, const uint8_t* scales, int64_t blocks,
                                          float global_scale, uint8_t* packed, float* squares) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, packed += kBlock / 2, squares += kPairs) {
    const float scale = e4m3_decode(scales[block]) * global_scale;
    uint32_t codes[kBlock];
    divide_and_encode(x, scale, codes);
    pack_block(codes, packed);
    Floats values;
    Words words;
    std::memcpy(&values, x, sizeof values);
    std::memcpy(&words, codes, sizeof words);
    values -= decoded(words) * scale;
    values *= values;
    HalfFloats halves[2];
    std::memcpy(halves, &values, sizeof halves);
    halves[0] += halves[1];
    std::memcpy(squares, halves, sizeof halves[0]);
  }
}

NIBBLE_FUNCTION float sum_of_pairs(const float* squares) {
  float sum = squares[0];
  for (uint32_t i = 1; i < kPairs; ++i) sum += squares[i];
  return sum;
}

}  // namespace

WeightRows::WeightRows(int64_t columns, float amax, float global_scale, bool four_over_six)
    : blocks_(columns / kBlock),
      sixth_(std::max(amax / kE2m1Max, kLeastAmax)),
      global_scale_(global_scale),
      four_over_six_(four_over_six),
      largest_(blocks_) {
  if (!four_over_six) return;
  scales_.resize(blocks_);
  packed_.resize(blocks_ * kBlock / 2);
  six_errors_.resize(blocks_ * kPairs);
  four_errors_.resize(blocks_ * kPairs);
}

void WeightRows::quantize(const float* x, uint8_t* packed, uint8_t* scales) {
  largest_of_blocks(x, blocks_, largest_.data());
  if (four_over_six_) {
    choose(x, packed, scales);
  } else {
    scales_for_six(largest_.data(), blocks_, kE2m1Max * global_scale_, scales);
    encode_six(x, scales, blocks_, global_scale_, packed);
  }
}

// The largest element of each block at 6, or at 4 if the error is smaller.
void WeightRows::choose(const float* x, uint8_t* packed, uint8_t* scales) {
  scales_for(largest_.data(), blocks_, 1.0f, sixth_, scales);
  scales_for(largest_.data(), blocks_, 1.5f, sixth_, scales_.data());
  encode_with_errors(x, scales, blocks_, global_scale_, packed, six_errors_.data());
  encode_with_errors(x, scales_.data(), blocks_, global_scale_, packed_.data(), four_errors_.data());
  for (int64_t block = 0; block < blocks_; ++block) {
    if (!(sum_of_pairs(&four_errors_[block * kPairs]) < sum_of_pairs(&six_errors_[block * kPairs]))) continue;
    std::memcpy(packed + block * kBlock / 2, &packed_[block * kBlock / 2], kBlock / 2);
    scales[block] = scales_[block];
  }
}

namespace {

constexpr int32_t kCodes = 8, kScales = 0x7f;  // magnitudes of E2M1; E4M3 from 0 to 448

float bfloat16_value(int32_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Whether bfloat16 of these bits becomes more than zero, for code 0, or at least that code.
bool reaches(int32_t bits, float scale, uint32_t code) {
  const float scaled = bfloat16_value(bits) / scale + 0.0f;
  return code == 0 ? scaled > 0.0f : e2m1_encode(scaled) >= code;
}

// The highest magnitude that does not reach the code; -1 if all do.
int16_t highest_below(float scale, uint32_t code) {
  constexpr double kTies[kCodes] = {0x1p-150, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
  const auto tie = static_cast<float>(kTies[code] * scale);
  int32_t bits = static_cast<int32_t>(std::bit_cast<uint32_t>(tie) >> 16) - 1;  // at most what is sought
  while (bits + 1 <= 0x7f80 && !reaches(bits + 1, scale, code)) ++bits;
  return static_cast<int16_t>(bits);
}

NIBBLE_CPU_LEVELS void largest_of_bfloat16(const uint16_t* x, int64_t blocks, float* largest) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock) {
    uint16_t most = 0;
    for (uint32_t i = 0; i < kBlock; ++i) {
      const uint16_t magnitude = x[i] & 0x7fff;
      most = magnitude > most ? magnitude : most;
    }
    largest[block] = std::bit_cast<float>(static_cast<uint32_t>(most) << 16);
  }
}

typedef uint8_t CodeBytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));
typedef uint8_t PackedBlock __attribute__((vector_size(8)));

NIBBLE_CPU_LEVELS void encode_bfloat16(const uint16_t* x, const uint8_t* scales, int64_t blocks,
                                       const Below* below, uint8_t* packed) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, packed += kBlock / 2) {
    Below::Block values;
    std::memcpy(&values, x, sizeof values);
    const Below::Block* limits = below[scales[block]].magnitudes;
    const Below::Block magnitudes = values & 0x7fff;
    Below::Block codes = values >> 12 & 8 & (magnitudes > limits[0]);
    for (int32_t code = 1; code < kCodes; ++code) codes -= magnitudes > limits[code];
    const Pairs pairs = Pairs(__builtin_convertvector(codes, CodeBytes));
    const PackedBlock both = __builtin_convertvector(pairs | pairs >> 4, PackedBlock);
    std::memcpy(packed, &both, sizeof both);
  }
}

}  // namespace

Bfloat16Rows::Bfloat16Rows(float global_scale) : global_scale_(global_scale), below_(kScales) {
  for (int32_t scale = 0; scale < kScales; ++scale) {
    for (int32_t code = 0; code < kCodes; ++code) {
      below_[scale].magnitudes[code] = Below::Block{} + highest_below(e4m3_decode(scale) * global_scale, code);
    }
  }
}

void Bfloat16Rows::quantize(const uint16_t* x, int64_t blocks, float* largest, uint8_t* packed,
                            uint8_t* scales) const {
  largest_of_bfloat16(x, blocks, largest);
  scales_for_six(largest, blocks, kE2m1Max * global_scale_, scales);
  encode_bfloat16(x, scales, blocks, below_.data(), packed);
}

namespace {

std::tuple<Tensor, Tensor> nvfp4_quantize_weight(const Tensor& input, const Tensor& amax,
                                                 const Tensor& global_scale, bool four_over_six) {
  const Tensor x = torch::stable::contiguous(input);
  const Shape shape = shape_of(x, x.size(x.dim() - 1));
  check_scalar(amax, "amax");
  check_scalar(global_scale, "global_scale");
  auto [packed, scales] = empty_outputs(x, shape, false);
  const float global = *static_cast<const float*>(global_scale.const_data_ptr());
  const float largest = *static_cast<const float*>(amax.const_data_ptr());
  uint8_t* packed_data = static_cast<uint8_t*>(packed.mutable_data_ptr());
  uint8_t* scale_data = static_cast<uint8_t*>(scales.mutable_data_ptr());
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    const int64_t at_once = std::max<int64_t>(1, 16384 / shape.columns);
    torch::stable::parallel_for(0, shape.rows, at_once, [&](int64_t begin, int64_t end) {
      WeightRows rows(shape.columns, largest, global, four_over_six);
      std::vector<float> floats(shape.columns);
      for (int64_t row = begin; row < end; ++row) {
        load(from + row * shape.columns, shape.columns, floats.data());
        rows.quantize(floats.data(), packed_data + row * shape.columns / 2, scale_data + row * shape.blocks());
      }
    });
  });
  return {packed, scales};
}

// Of numbers without their signs, whose bits have the order of their values; NaN is above infinity.
template <class Bits>
NIBBLE_FUNCTION Bits largest_bits(const Bits* x, int64_t count) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  Bits largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = x[i] & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

NIBBLE_CPU_LEVELS uint16_t largest_half(const uint16_t* x, int64_t count) { return largest_bits(x, count); }
NIBBLE_CPU_LEVELS uint32_t largest_float(const uint32_t* x, int64_t count) { return largest_bits(x, count); }

Tensor largest_magnitude(const Tensor& input) {
  constexpr int64_t kChunk = 1 << 16;
  const Tensor x = torch::stable::contiguous(input);
  Tensor result = torch::stable::new_empty(x, {}, ScalarType::Float);
  const int64_t chunks = (x.numel() + kChunk - 1) / kChunk;
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    const Bits* from = static_cast<const Bits*>(x.const_data_ptr());
    std::vector<Bits> largest(chunks + 1);
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t at = chunk * kChunk, count = std::min(kChunk, x.numel() - at);
        if constexpr (sizeof(T) == 2) {
          largest[chunk] = largest_half(from + at, count);
        } else {
          largest[chunk] = largest_float(from + at, count);
        }
      }
    });
    const Bits bits = *std::max_element(largest.begin(), largest.end());
    T value;
    std::memcpy(&value, &bits, sizeof value);
    *static_cast<float*>(result.mutable_data_ptr()) = static_cast<float>(value);
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("nvfp4_quantize_weight", TORCH_BOX(&nvfp4_quantize_weight));
  library.impl("largest_magnitude", TORCH_BOX(&largest_magnitude));
}

}  // namespace nibble::cpu
