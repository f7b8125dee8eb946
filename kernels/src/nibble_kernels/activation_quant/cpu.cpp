// nibble::nvfp4_quant and the operators that fuse something before it, on the CPU: reference.py with vector
// instructions.
#include "nibble/exact.h"
#include "nibble/nvfp4_weight.h"

namespace nibble::cpu {
namespace {

NIBBLE_CPU_LEVELS void quantize_row(const float* x, int64_t blocks, float global_scale_inv, uint8_t* packed,
                                    uint8_t* scales) {
  const float global_scale = 1.0f / global_scale_inv;
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, packed += kBlock / 2) {
    const uint32_t scale = e4m3_encode(global_scale_inv * (block_amax(x) * (1.0f / 6.0f)));
    const float value = e4m3_decode(scale);
    uint32_t codes[kBlock];
    encode_block(x, value == 0.0f ? 0.0f : 1.0f / (value * global_scale), codes);
    pack_block(codes, packed);
    scales[block] = static_cast<uint8_t>(scale);
  }
}

// Compilers make instructions of these that loops over arrays do not get.
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int16_t Words __attribute__((vector_size(16)));

// Twice the values of a block of packed codes, in the order of QuantizedRows; returns their sum.
NIBBLE_FUNCTION int32_t double_values(const uint8_t* packed, int8_t* doubled) {
  Bytes pairs = {};
  std::memcpy(&pairs, packed, kBlock / 2);
  const Bytes code =
      __builtin_shufflevector(pairs, pairs >> 4, 0, 2, 16, 18, 1, 3, 17, 19, 4, 6, 20, 22, 5, 7, 21, 23) & 15;
  const Bytes index = code & 7, sign = -(code >> 3);
  const Bytes magnitude = index + ((index > 4) & (index - 4)) + ((index == 7) & 2);
  const Bytes values = (magnitude ^ sign) - sign;
  std::memcpy(doubled, &values, sizeof values);
  Words both;
  std::memcpy(&both, &values, sizeof both);
  Words sum = (both << 8 >> 8) + (both >> 8);
  sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
  sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
  return sum[0] + sum[1];
}

// Of an E4M3 scale, times 2^6 as QuantizedRows has it.
NIBBLE_FUNCTION ScaledOffset scaled_offset(uint32_t scale, int32_t offset) {
  const uint32_t exponent = scale >> 3 & 15, magnitude = (scale & 7) + (exponent ? 8 : 0);
  const int32_t significand = scale & 0x80 ? -static_cast<int32_t>(magnitude) : static_cast<int32_t>(magnitude);
  const uint32_t base = (127 + 19 + std::max(exponent, 1u)) << 23 | 1u << 22;
  return {static_cast<int32_t>((significand & 0xffff) * 0x10001u), static_cast<int32_t>(base) + offset * significand,
          (scale & 0x7f) == 0x7f ? std::numeric_limits<float>::quiet_NaN() : std::bit_cast<float>(base)};
}

NIBBLE_CPU_LEVELS void quantize_bytes(const float* x, int64_t blocks, float global_scale_inv, int8_t* values,
                                      float* scales, int32_t* offsets, ScaledOffset* scaled_offsets) {
  const float global_scale = 1.0f / global_scale_inv;
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, values += kBlock) {
    const uint32_t scale = e4m3_encode(global_scale_inv * (block_amax(x) * (1.0f / 6.0f)));
    const float value = e4m3_decode(scale);
    uint32_t codes[kBlock];
    uint8_t packed[kBlock / 2];
    encode_block(x, value == 0.0f ? 0.0f : 1.0f / (value * global_scale), codes);
    pack_block(codes, packed);
    offsets[block] = -12 * double_values(packed, values);
    scales[block] = value * 0x1p6f;
    scaled_offsets[block] = scaled_offset(scale, offsets[block]);
  }
}

NIBBLE_CPU_LEVELS void silu_mul_row(const float* gate, const float* up, int64_t columns, float* result) {
  for (int64_t i = 0; i < columns; ++i) result[i] = exact_silu(gate[i]) * up[i];
}

// The sum of squares, neighbours first. `scratch` holds a power of two of floats, at least `columns`.
NIBBLE_CPU_LEVELS float sum_of_squares(const float* x, int64_t columns, float* scratch) {
  const int64_t width = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(columns)));
  for (int64_t i = 0; i < columns; ++i) scratch[i] = x[i] * x[i];
  for (int64_t i = columns; i < width; ++i) scratch[i] = 0.0f;
  for (int64_t half = width / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) scratch[i] = scratch[2 * i] + scratch[2 * i + 1];
  }
  return scratch[0];
}

NIBBLE_CPU_LEVELS void scale_row(const float* x, const float* weight, float inverse, int64_t columns,
                                 float* result) {
  for (int64_t i = 0; i < columns; ++i) result[i] = x[i] * inverse * weight[i];
}

// Quantizes rows that `make_row(row, floats)` writes.
template <class F>
std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Shape& shape, const Tensor& global_scale_inv,
                                    bool tiled, const F& make_row) {
  check_scalar(global_scale_inv, "global_scale_inv");
  auto [packed, scales] = empty_outputs(x, shape, tiled);
  clear_padding(shape, tiled, scales);
  const float inverse = *static_cast<const float*>(global_scale_inv.const_data_ptr());
  uint8_t* packed_data = static_cast<uint8_t*>(packed.mutable_data_ptr());
  uint8_t* scale_data = static_cast<uint8_t*>(scales.mutable_data_ptr());
  for_rows(shape.rows, shape.columns, [&](int64_t row) {
    thread_local std::vector<float> floats;
    thread_local std::vector<uint8_t> row_scales;
    floats.resize(shape.columns);
    row_scales.resize(shape.blocks());
    make_row(row, floats.data());
    quantize_row(floats.data(), shape.blocks(), inverse, packed_data + row * shape.columns / 2,
                 row_scales.data());
    place_scales(row_scales.data(), shape, row, tiled, scale_data);
  });
  return {packed, scales};
}

std::tuple<Tensor, Tensor> nvfp4_quant(const Tensor& input, const Tensor& global_scale_inv, bool tiled,
                                       bool) {
  const Tensor x = torch::stable::contiguous(input);
  const Shape shape = shape_of(x, x.size(x.dim() - 1));
  std::tuple<Tensor, Tensor> result;
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    result = quantize(x, shape, global_scale_inv, tiled, [&](int64_t row, float* floats) {
      load(from + row * shape.columns, shape.columns, floats);
    });
  });
  return result;
}

std::tuple<Tensor, Tensor> silu_mul_nvfp4_quant(const Tensor& input, const Tensor& global_scale_inv,
                                                bool tiled, bool) {
  const Tensor x = torch::stable::contiguous(input);
  const Shape shape = shape_of(x, x.size(x.dim() - 1) / 2);
  std::tuple<Tensor, Tensor> result;
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    result = quantize(x, shape, global_scale_inv, tiled, [&](int64_t row, float* floats) {
      thread_local std::vector<float> gate_up;
      gate_up.resize(2 * shape.columns);
      load(from + row * 2 * shape.columns, 2 * shape.columns, gate_up.data());
      silu_mul_row(gate_up.data(), gate_up.data() + shape.columns, shape.columns, floats);
      round_row<T>(floats, shape.columns);
    });
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> add_rmsnorm_nvfp4_quant(const Tensor& input, const Tensor& input_residual,
                                                           const Tensor& input_weight,
                                                           const Tensor& global_scale_inv, double epsilon,
                                                           bool tiled, bool) {
  const Tensor x = torch::stable::contiguous(input), residual = torch::stable::contiguous(input_residual);
  const Tensor weight = torch::stable::contiguous(input_weight);
  const Shape shape = shape_of(x, x.size(x.dim() - 1));
  check_same(x, residual, "residual");
  require(weight.numel() == shape.columns && weight.scalar_type() == x.scalar_type(),
          "weight must have x's type and one element a column");
  Tensor total = torch::stable::new_empty(x, x.sizes());
  std::tuple<Tensor, Tensor> result;
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    const T* added = static_cast<const T*>(residual.const_data_ptr());
    T* sums = static_cast<T*>(total.mutable_data_ptr());
    std::vector<float> weights(shape.columns);
    load(static_cast<const T*>(weight.const_data_ptr()), shape.columns, weights.data());
    result = quantize(x, shape, global_scale_inv, tiled, [&](int64_t row, float* floats) {
      thread_local std::vector<float> scratch;
      scratch.resize(std::bit_ceil(static_cast<uint64_t>(shape.columns)));
      const int64_t offset = row * shape.columns;
      load(from + offset, shape.columns, floats);
      load(added + offset, shape.columns, scratch.data());
      for (int64_t i = 0; i < shape.columns; ++i) floats[i] += scratch[i];
      store(floats, shape.columns, sums + offset);
      load(sums + offset, shape.columns, floats);
      const float mean =
          sum_of_squares(floats, shape.columns, scratch.data()) / static_cast<float>(shape.columns);
      const float inverse = 1.0f / std::sqrt(mean + static_cast<float>(epsilon));
      scale_row(floats, weights.data(), inverse, shape.columns, floats);
      round_row<T>(floats, shape.columns);
    });
  });
  return {std::get<0>(result), std::get<1>(result), total};
}

}  // namespace

void quantize_row(const float* x, int64_t columns, float global_scale_inv, int8_t* values, float* scales,
                  int32_t* offsets, ScaledOffset* scaled_offsets) {
  quantize_bytes(x, columns / kBlock, global_scale_inv, values, scales, offsets, scaled_offsets);
}

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("nvfp4_quant", TORCH_BOX(&nvfp4_quant));
  library.impl("silu_mul_nvfp4_quant", TORCH_BOX(&silu_mul_nvfp4_quant));
  library.impl("add_rmsnorm_nvfp4_quant", TORCH_BOX(&add_rmsnorm_nvfp4_quant));
}

}  // namespace nibble::cpu
