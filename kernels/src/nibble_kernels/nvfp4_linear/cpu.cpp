// nibble::nvfp4_linear on the CPU.
#include "nibble/nvfp4_weight.h"

#include <optional>

namespace nibble::cpu {
namespace {

// What follows the sums, for each column of the result.
struct Epilogue {
  float alpha;
  const float* column_scale;  // may be null, as may bias
  const float* bias;
};

template <class T>
void finish_tile(const float* sums, int64_t stride, int64_t rows, int64_t begin, int64_t end,
                 const Epilogue& epilogue, T* to, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t n = begin; n < end; ++n) {
      float y = sums[(n - begin) * stride + row] * epilogue.alpha;
      if (epilogue.column_scale) y *= epilogue.column_scale[n];
      if (epilogue.bias) y += epilogue.bias[n];
      to[row * columns + n] = static_cast<T>(y);
    }
  }
}

// `rows` rows of x, at most kManyRows.
template <class T>
void multiply_rows(const T* from, int64_t rows, const Nvfp4Weight& weight, const float* input_scale_inv,
                   const Epilogue& epilogue, T* to) {
  Activations activations(rows, weight.columns);
  for_rows(rows, weight.columns, [&](int64_t row) {
    thread_local std::vector<float> floats;
    floats.resize(weight.columns);
    load(from + row * weight.columns, weight.columns, floats.data());
    if (input_scale_inv) round_to_nvfp4(floats.data(), weight.columns, *input_scale_inv);
    activations.set_row(row, floats.data());
  });
  for_tiles(weight.rows, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> sums;
    sums.resize(kWeightRows * activations.stride());
    activations.multiply(weight, begin, end, sums.data());
    finish_tile(sums.data(), activations.stride(), rows, begin, end, epilogue, to, weight.rows);
  });
}

// A tensor's floats, or null where there is none. Other types are converted into `copy`.
const float* floats_of(const std::optional<Tensor>& tensor, int64_t count, const char* name,
                       std::vector<float>& copy) {
  if (!tensor) return nullptr;
  const Tensor x = torch::stable::contiguous(*tensor);
  require(x.numel() == count, name, " must have ", count, " elements");
  copy.resize(count);
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    load(static_cast<const T*>(x.const_data_ptr()), count, copy.data());
  });
  return copy.data();
}

Tensor nvfp4_linear(const Tensor& input, const Tensor& codes, const Tensor& scales,
                    const Tensor& global_scale, const std::optional<Tensor>& column_scale,
                    const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale_inv) {
  const Tensor x = torch::stable::contiguous(input);
  const Tensor all_codes = torch::stable::contiguous(codes), all_scales = torch::stable::contiguous(scales);
  const Nvfp4Weight weight = weight_of(all_codes, all_scales, x.size(x.dim() - 1));
  check_scalar(global_scale, "global_scale");
  Epilogue epilogue{*static_cast<const float*>(global_scale.const_data_ptr()), nullptr, nullptr};
  const float* inverse = nullptr;
  if (input_scale_inv) {
    check_scalar(*input_scale_inv, "input_scale_inv");
    inverse = static_cast<const float*>(input_scale_inv->const_data_ptr());
    epilogue.alpha *= 1.0f / *inverse;
  }
  std::vector<float> column_floats, bias_floats;
  epilogue.column_scale = floats_of(column_scale, weight.rows, "column_scale", column_floats);
  epilogue.bias = floats_of(bias, weight.rows, "bias", bias_floats);
  Tensor y = torch::stable::new_empty(x, with_last(x, weight.rows), x.scalar_type());
  const int64_t rows = x.numel() / weight.columns;
  for_float_type<true>(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    for (int64_t row = 0; row < rows; row += kManyRows) {
      multiply_rows(from + row * weight.columns, std::min(kManyRows, rows - row), weight, inverse, epilogue,
                    to + row * weight.rows);
    }
  });
  return y;
}

Tensor nvfp4_cpu_levels(const Tensor& like) {
  const auto& levels = matmul_levels();
  Tensor result = torch::stable::new_empty(like, {static_cast<int64_t>(levels.size())}, ScalarType::Long);
  for (size_t i = 0; i < levels.size(); ++i)
    static_cast<int64_t*>(result.mutable_data_ptr())[i] = levels[i]->number;
  return result;
}

void nvfp4_use_cpu_level(const Tensor&, int64_t index) {
  require(index >= 0 && index < static_cast<int64_t>(matmul_levels().size()), "no such level");
  use_matmul_level(index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nibble, CPU, library) {
  library.impl("nvfp4_linear", TORCH_BOX(&nvfp4_linear));
  library.impl("nvfp4_cpu_levels", TORCH_BOX(&nvfp4_cpu_levels));
  library.impl("nvfp4_use_cpu_level", TORCH_BOX(&nvfp4_use_cpu_level));
}

}  // namespace nibble::cpu
