// nibble::gguf_to_bfloat16, gguf_largest_magnitude and gguf_to_nvfp4 on the CPU: reference.py with vector
// instructions.
#include "gguf_blocks/kinds.h"
#include "nibble/cpu.h"
#include "weight_quant/rows.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kSmall = 32, kSuper = 256;  // elements of a block
constexpr int64_t kPart = 4096;               // elements that are in the cache while they are compared
constexpr int64_t kAtOnce = 1 << 15;          // elements of a thread's share, at least

NIBBLE_FUNCTION float half_at(const uint8_t* from) {
  torch::headeronly::Half value;
  std::memcpy(&value, from, sizeof value);
  return static_cast<float>(value);
}

NIBBLE_FUNCTION void store_rounded(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to[i] = static_cast<uint16_t>((bits & 0x7fffffff) > kFloatInfinity ? 0x7fc0 : rounded);
  }
}

// Four-bit codes have only 16 values a scale: they are computed once and looked up. Loops over sixteen would
// not become vector instructions here.
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t SignedWords __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

constexpr Floats kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

NIBBLE_FUNCTION Halves rounded(const Floats& values) {
  Words bits;
  std::memcpy(&bits, &values, sizeof bits);
  const Words even = bits + 0x7fff + (bits >> 16 & 1);
  // All ones, or zero
  const Words nan = Words(SignedWords(kFloatInfinity - (bits & 0x7fffffff)) >> 31);
  return __builtin_convertvector((even >> 16 & ~nan) | (nan & 0x7fc0), Halves);
}

// The values of sixteen bytes' nibbles: the low ones, or those above `shift`.
NIBBLE_FUNCTION void look_up(const Halves& values, const uint8_t* codes, int32_t shift, uint16_t* to) {
  Bytes bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  const Halves index = __builtin_convertvector(bytes, Halves) >> shift & 15;
#ifdef __clang__
  for (int32_t i = 0; i < 16; ++i) to[i] = values[index[i]];
#else
  const Halves found = __builtin_shuffle(values, index);
  std::memcpy(to, &found, sizeof found);
#endif
}

// Blocks of 32: [scale, minimum?, codes].
template <bool HasMinimum>
NIBBLE_FUNCTION void nibble_block(const uint8_t* from, uint16_t* to) {
  const float scale = half_at(from), minimum = HasMinimum ? half_at(from + 2) : 0.0f;
  const Halves values = rounded(HasMinimum ? scale * kCodes + minimum : scale * (kCodes - 8.0f));
  for (int32_t half = 0; half < 2; ++half) look_up(values, from + (HasMinimum ? 4 : 2), half * 4, to + half * 16);
}

// Blocks of 32: [scale, minimum?, fifth bits, nibbles].
template <bool HasMinimum>
NIBBLE_FUNCTION void five_bit_block(const uint8_t* from, uint16_t* to) {
  const float scale = half_at(from), minimum = HasMinimum ? half_at(from + 2) : 0.0f;
  from += HasMinimum ? 4 : 2;
  uint32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  int32_t codes[kSmall];
  for (int32_t i = 0; i < 16; ++i) {
    codes[i] = from[4 + i] & 15;
    codes[16 + i] = from[4 + i] >> 4;
  }
  float values[kSmall];
  for (int32_t i = 0; i < kSmall; ++i) {
    const int32_t code = codes[i] | (bits >> i & 1) << 4;
    values[i] = HasMinimum ? scale * static_cast<float>(code) + minimum : scale * static_cast<float>(code - 16);
  }
  store_rounded(values, kSmall, to);
}

NIBBLE_FUNCTION void byte_block(const uint8_t* from, uint16_t* to) {
  const float scale = half_at(from);
  float values[kSmall];
  for (int64_t i = 0; i < kSmall; ++i) values[i] = static_cast<float>(static_cast<int8_t>(from[2 + i])) * scale;
  store_rounded(values, kSmall, to);
}

// Super-blocks of 256 with eight scales and minima of six bits.
template <bool HasFifthBit>
NIBBLE_FUNCTION void scaled_block(const uint8_t* from, uint16_t* to) {
  const float scale = half_at(from), minimum = half_at(from + 2);
  const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
  const uint8_t* fifth = from + 16;
  const uint8_t* codes = from + (HasFifthBit ? 48 : 16);
  float values[kSuper];  // of codes with a fifth bit
  for (int64_t part = 0; part < 8; ++part) {
    const int64_t i = part % 4;
    const int32_t six = part < 4 ? low[i] & 63 : (high[i] & 15) | (low[i] >> 2 & 48);
    const int32_t offset = part < 4 ? middle[i] & 63 : high[i] >> 4 | (middle[i] >> 2 & 48);
    const float part_scale = scale * static_cast<float>(six);
    const float part_minimum = minimum * static_cast<float>(offset);
    const uint8_t* bytes = codes + part / 2 * 32;
    const int32_t shift = part % 2 * 4;
    if constexpr (HasFifthBit) {
      for (int64_t j = 0; j < kSmall; ++j) {
        const int32_t code = (bytes[j] >> shift & 15) | (fifth[j] >> part & 1) << 4;
        values[part * kSmall + j] = part_scale * static_cast<float>(code) - part_minimum;
      }
    } else {
      const Halves of_codes = rounded(part_scale * kCodes - part_minimum);
      for (int64_t j = 0; j < kSmall; j += 16) look_up(of_codes, bytes + j, shift, to + part * kSmall + j);
    }
  }
  if constexpr (HasFifthBit) store_rounded(values, kSuper, to);
}

NIBBLE_FUNCTION void six_bit_block(const uint8_t* from, uint16_t* to) {
  const float scale = half_at(from + 208);
  float values[kSuper];
  for (int64_t part = 0; part < 8; ++part) {
    const uint8_t* low = from + part / 4 * 64 + part % 2 * 32;
    const uint8_t* high = from + 128 + part / 4 * 32;
    const int32_t low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
    for (int64_t half = 0; half < 2; ++half) {
      const auto small = static_cast<int8_t>(from[192 + part * 2 + half]);
      const float part_scale = scale * static_cast<float>(small);
      for (int64_t j = half * 16; j < half * 16 + 16; ++j) {
        const int32_t code = (low[j] >> low_shift & 15) | (high[j] >> high_shift & 3) << 4;
        values[part * 32 + j] = part_scale * static_cast<float>(code - 32);
      }
    }
  }
  store_rounded(values, kSuper, to);
}

#define NIBBLE_GGUF_BLOCKS(name, elements, bytes, block)                             \
  NIBBLE_CPU_LEVELS void name(const uint8_t* from, int64_t blocks, uint16_t* to) {   \
    for (int64_t i = 0; i < blocks; ++i) block(from + i * bytes, to + i * elements); \
  }

NIBBLE_GGUF_BLOCKS(q4_0, kSmall, 18, nibble_block<false>)
NIBBLE_GGUF_BLOCKS(q4_1, kSmall, 20, nibble_block<true>)
NIBBLE_GGUF_BLOCKS(q5_0, kSmall, 22, five_bit_block<false>)
NIBBLE_GGUF_BLOCKS(q5_1, kSmall, 24, five_bit_block<true>)
NIBBLE_GGUF_BLOCKS(q8_0, kSmall, 34, byte_block)
NIBBLE_GGUF_BLOCKS(q4_k, kSuper, 144, scaled_block<false>)
NIBBLE_GGUF_BLOCKS(q5_k, kSuper, 176, scaled_block<true>)
NIBBLE_GGUF_BLOCKS(q6_k, kSuper, 210, six_bit_block)

NIBBLE_CPU_LEVELS void bf16(const uint8_t* from, int64_t count, uint16_t* to) {
  std::memcpy(to, from, count * sizeof *to);
}

NIBBLE_CPU_LEVELS void f32(const uint8_t* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    store_rounded(&value, 1, to + i);
  }
}

NIBBLE_CPU_LEVELS void f16(const uint8_t* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = half_at(from + i * sizeof *to);
    store_rounded(&value, 1, to + i);
  }
}

const GgufKind kKinds[] = {
    {"Q4_0", kSmall, 18, q4_0},  {"Q4_1", kSmall, 20, q4_1},  {"Q5_0", kSmall, 22, q5_0},
    {"Q5_1", kSmall, 24, q5_1},  {"Q8_0", kSmall, 34, q8_0},  {"Q4_K", kSuper, 144, q4_k},
    {"Q5_K", kSuper, 176, q5_k}, {"Q6_K", kSuper, 210, q6_k}, {"BF16", 1, 2, bf16},
    {"F16", 1, 2, f16},          {"F32", 1, 4, f32}};

const GgufKind& kind_of(const Tensor& blocks, const std::string& name) {
  const GgufKind& kind = gguf_kind(name);
  require(blocks.scalar_type() == ScalarType::Byte && blocks.numel() % kind.bytes == 0,
          "blocks must be uint8, whole blocks of ", kind.bytes, " bytes");
  return kind;
}

Tensor gguf_to_bfloat16(const Tensor& input, std::string name) {
  const Tensor blocks = torch::stable::contiguous(input);
  const GgufKind& kind = kind_of(blocks, name);
  const int64_t count = blocks.numel() / kind.bytes;
  Tensor result = torch::stable::new_empty(blocks, {count * kind.elements}, ScalarType::BFloat16);
  const auto* from = static_cast<const uint8_t*>(blocks.const_data_ptr());
  auto* to = static_cast<uint16_t*>(result.mutable_data_ptr());
  torch::stable::parallel_for(0, count, kAtOnce / kind.elements, [&](int64_t begin, int64_t end) {
    kind.to_bfloat16(from + begin * kind.bytes, end - begin, to + begin * kind.elements);
  });
  return result;
}

// Of bfloat16 without signs, whose bits have the order of their values; NaN is above infinity.
NIBBLE_CPU_LEVELS uint16_t largest_bits(const uint16_t* x, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

Tensor gguf_largest_magnitude(const Tensor& input, std::string name) {
  const Tensor blocks = torch::stable::contiguous(input);
  const GgufKind& kind = kind_of(blocks, name);
  const int64_t count = blocks.numel() / kind.bytes, step = kPart / kind.elements;
  const int64_t parts = (count + step - 1) / step;
  const auto* from = static_cast<const uint8_t*>(blocks.const_data_ptr());
  std::vector<uint16_t> largest(parts + 1);
  torch::stable::parallel_for(0, parts, kAtOnce / kPart, [&](int64_t begin, int64_t end) {
    uint16_t values[kPart];
    for (int64_t part = begin; part < end; ++part) {
      const int64_t blocks_here = std::min(step, count - part * step);
      kind.to_bfloat16(from + part * step * kind.bytes, blocks_here, values);
      largest[part] = largest_bits(values, blocks_here * kind.elements);
    }
  });
  Tensor result = torch::stable::new_empty(blocks, {}, ScalarType::Float);
  const uint32_t bits = static_cast<uint32_t>(*std::max_element(largest.begin(), largest.end())) << 16;
  *static_cast<float*>(result.mutable_data_ptr()) = std::bit_cast<float>(bits);
  return result;
}

NIBBLE_CPU_LEVELS void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
}

// Where a row of a head is whose RoPE pairs are side by side: the result has all first ones, then all others.
int64_t interleaved(int64_t row, int64_t head_rows) {
  const int64_t head = row / head_rows * head_rows, place = row % head_rows, half = head_rows / 2;
  return head + place % half * 2 + place / half;
}

void gguf_to_nvfp4(const Tensor& blocks, std::string name, int64_t heads, const Tensor& amax,
                   const Tensor& global_scale, bool four_over_six, Tensor& packed, Tensor& scales) {
  const GgufKind& kind = kind_of(blocks, name);
  require(packed.dim() == 2 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous(),
          "packed must be contiguous uint8 [N, K/2]");
  const int64_t rows = packed.size(0), columns = packed.size(1) * 2;
  require(columns % kBlock == 0 && columns % kind.elements == 0, "rows of ", columns, " are not whole blocks");
  require(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float8_e4m3fn &&
              scales.numel() == rows * columns / kBlock,
          "scales must be contiguous float8_e4m3fn [N, K/16]");
  require(blocks.is_contiguous() && blocks.numel() / kind.bytes * kind.elements == rows * columns,
          "blocks must be contiguous, of ", rows * columns, " elements");
  require(heads >= 0 && (heads == 0 || rows % (2 * heads) == 0), "rows are not those of ", heads, " heads");
  check_scalar(amax, "amax");
  check_scalar(global_scale, "global_scale");
  const float largest = *static_cast<const float*>(amax.const_data_ptr());
  const float global = *static_cast<const float*>(global_scale.const_data_ptr());
  const int64_t row_blocks = columns / kind.elements, row_bytes = row_blocks * kind.bytes;
  const auto* from = static_cast<const uint8_t*>(blocks.const_data_ptr());
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  auto* to_scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  if (columns == 0) return;
  const Bfloat16Rows rounding(global);
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kAtOnce / columns), [&](int64_t begin, int64_t end) {
    WeightRows choosing(columns, largest, global, four_over_six);
    std::vector<uint16_t> rounded(columns);
    std::vector<float> values(columns);  // or the largest of each block
    for (int64_t row = begin; row < end; ++row) {
      const int64_t source = heads ? interleaved(row, rows / heads) : row;
      uint8_t *codes = to + row * columns / 2, *block_scales = to_scales + row * columns / kBlock;
      kind.to_bfloat16(from + source * row_bytes, row_blocks, rounded.data());
      if (four_over_six) {
        widen(rounded.data(), columns, values.data());
        choosing.quantize(values.data(), codes, block_scales);
      } else {
        rounding.quantize(rounded.data(), columns / kBlock, values.data(), codes, block_scales);
      }
    }
  });
}

}  // namespace

const GgufKind& gguf_kind(const std::string& name) {
  const GgufKind* kind =
      std::find_if(std::begin(kKinds), std::end(kKinds), [&](const GgufKind& one) { return one.name == name; });
  require(kind != std::end(kKinds), "an unknown type of GGUF block");
  return *kind;
}

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("gguf_to_bfloat16", TORCH_BOX(&gguf_to_bfloat16));
  library.impl("gguf_largest_magnitude", TORCH_BOX(&gguf_largest_magnitude));
  library.impl("gguf_to_nvfp4", TORCH_BOX(&gguf_to_nvfp4));
}

}  // namespace nibble::cpu
