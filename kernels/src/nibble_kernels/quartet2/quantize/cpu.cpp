// nibble::quant_fp4 on the CPU: reference.py with vector instructions.
#include "nibble/cpu.h"

#include <optional>

namespace nibble::cpu {
namespace {

struct Candidate {
  uint32_t scale;
  float step;  // the scale's value times G
  uint32_t codes[kBlock];
};

// The block with its largest element at 1/inverse.
NIBBLE_FUNCTION void quantize_block(const float* x, float amax, float g, float inverse, Candidate& result) {
  result.scale = e4m3_encode((amax * inverse) * (1.0f / g));
  const float value = e4m3_decode(result.scale);
  result.step = value * g;
  encode_block(x, 1.0f / ((value == 0.0f ? 1.0f : value) * g), result.codes);
}

// The sum of squared differences, in reference.py's order.
NIBBLE_FUNCTION float block_error(const float* x, const Candidate& candidate) {
  float difference[kBlock];
  for (uint32_t i = 0; i < kBlock; ++i)
    difference[i] = std::fma(-e2m1_decode(candidate.codes[i]), candidate.step, x[i]);
  float sums[2][2] = {};  // even and odd elements of the first eight and of the last
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 8; ++i) {
      const float d = difference[half * 8 + i];
      sums[half][i % 2] = std::fma(d, d, sums[half][i % 2]);
    }
  }
  return (sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]);
}

struct Scales {
  float g;
  float inverse_6;
  float inverse_4;
};

NIBBLE_CPU_LEVELS void quantize_row(const float* x, int64_t blocks, Scales tensor, bool four_over_six,
                                    uint8_t* packed, uint8_t* scales) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, packed += kBlock / 2) {
    const float amax = block_amax(x);
    Candidate six, four;
    quantize_block(x, amax, tensor.g, tensor.inverse_6, six);
    const Candidate* best = &six;
    if (four_over_six) {
      quantize_block(x, amax, tensor.g, tensor.inverse_4, four);
      if (block_error(x, four) < block_error(x, six)) best = &four;
    }
    pack_block(best->codes, packed);
    scales[block] = static_cast<uint8_t>(best->scale);
  }
}

NIBBLE_CPU_LEVELS uint32_t row_amax_bits(const float* x, int64_t blocks) {
  uint32_t largest = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    largest = std::max(largest, std::bit_cast<uint32_t>(block_amax(x + block * kBlock)));
  }
  return largest;
}

template <class T>
float tensor_amax(const T* from, const Shape& shape) {
  std::vector<uint32_t> rows(shape.rows, 0);
  for_rows(shape.rows, shape.columns, [&](int64_t row) {
    thread_local std::vector<float> floats;
    floats.resize(shape.columns);
    load(from + row * shape.columns, shape.columns, floats.data());
    rows[row] = row_amax_bits(floats.data(), shape.blocks());
  });
  uint32_t largest = 0;
  for (const uint32_t row : rows) largest = std::max(largest, row);
  return std::bit_cast<float>(largest);
}

std::tuple<Tensor, Tensor, Tensor> quant_fp4(const Tensor& input, const std::optional<Tensor>& amax,
                                             bool four_over_six, double scale_override, bool tiled, bool) {
  const Tensor x = torch::stable::contiguous(input);
  const Shape shape = shape_of(x, x.size(x.dim() - 1));
  if (amax) check_scalar(*amax, "amax");
  auto [packed, scales] = empty_outputs(x, shape, tiled);
  clear_padding(shape, tiled, scales);
  Tensor tensor_scale = torch::stable::new_empty(x, std::vector<int64_t>(), ScalarType::Float);
  uint8_t* packed_data = static_cast<uint8_t*>(packed.mutable_data_ptr());
  uint8_t* scale_data = static_cast<uint8_t*>(scales.mutable_data_ptr());
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    const float largest =
        amax ? *static_cast<const float*>(amax->const_data_ptr()) : tensor_amax(from, shape);
    const float override = static_cast<float>(scale_override);
    const float g = (largest * (four_over_six ? 1.0f / 256.0f : 1.0f / 448.0f)) * (override * (1.0f / 6.0f));
    const Scales tensor{largest == 0.0f || shape.rows == 0 ? 1.0f : g, (1.0f / 6.0f) * override,
                        (1.0f / 4.0f) * override};
    *static_cast<float*>(tensor_scale.mutable_data_ptr()) = tensor.g;
    for_rows(shape.rows, shape.columns, [&](int64_t row) {
      thread_local std::vector<float> floats;
      thread_local std::vector<uint8_t> row_scales;
      floats.resize(shape.columns);
      row_scales.resize(shape.blocks());
      load(from + row * shape.columns, shape.columns, floats.data());
      quantize_row(floats.data(), shape.blocks(), tensor, four_over_six,
                   packed_data + row * shape.columns / 2, row_scales.data());
      place_scales(row_scales.data(), shape, row, tiled, scale_data);
    });
  });
  return {packed, scales, tensor_scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) { library.impl("quant_fp4", TORCH_BOX(&quant_fp4)); }

}  // namespace nibble::cpu
