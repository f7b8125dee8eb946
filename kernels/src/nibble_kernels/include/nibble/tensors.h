// What the operators of every device share: checks of arguments, and the tensors they return.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "scale_layout.h"

namespace nibble {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, int64_t part) { text += std::to_string(part); }

// Throws what Python sees as a RuntimeError. STD_TORCH_CHECK writes its message to a stream, and that crashes
// where a compiler links its C++ library into this one statically (seen with a gcc that does).
template <class... Parts>
void require(bool condition, const Parts&... message) {
  if (condition) return;
  std::string text;
  (append(text, message), ...);
  throw std::runtime_error(text);
}

// Calls f with a value of the C++ type of `type`: f(type_of<T>).
template <class T>
struct TypeOf {
  using type = T;
};

template <bool WithFloat, class F>
void for_float_type(ScalarType type, F&& f) {
  if (type == ScalarType::BFloat16) return f(TypeOf<torch::headeronly::BFloat16>());
  if (type == ScalarType::Half) return f(TypeOf<torch::headeronly::Half>());
  if constexpr (WithFloat) {
    if (type == ScalarType::Float) return f(TypeOf<float>());
  }
  require(false, "expected bfloat16", WithFloat ? ", float16 or float32" : " or float16", ", found ",
          torch::headeronly::toString(type));
}

// Calls f(std::true_type) or f(std::false_type): a run-time choice as a template argument.
template <class F>
void for_bool(bool value, F&& f) {
  if (value) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

// Rows of a tensor of any number of dimensions, and of its NVFP4 form.
struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t tiles;  // side by side, in the tiled layout

  int64_t blocks() const { return columns / kBlock; }
};

inline Shape shape_of(const Tensor& x, int64_t columns) {
  require(columns > 0 && columns % kBlock == 0, "NVFP4 has blocks of 16 columns, found rows of ", columns);
  const int64_t row = x.size(x.dim() - 1);
  return {x.numel() / row, columns, round_up<int64_t>(columns / kBlock, kTileBlocks) / kTileBlocks};
}

inline std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  const auto sizes = x.sizes();
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// Codes and scales without contents.
inline std::tuple<Tensor, Tensor> empty_outputs(const Tensor& x, const Shape& shape, bool tiled) {
  auto scales = with_last(x, shape.blocks());
  if (tiled) scales = {round_up<int64_t>(shape.rows, kTileRows), shape.tiles * kTileBlocks};
  return {torch::stable::new_empty(x, with_last(x, shape.columns / 2), ScalarType::Byte),
          torch::stable::new_empty(x, scales, ScalarType::Float8_e4m3fn)};
}

inline void check_scalar(const Tensor& value, const char* name) {
  require(value.numel() == 1 && value.scalar_type() == ScalarType::Float, name, " must be one float32");
}

inline void check_same(const Tensor& x, const Tensor& other, const char* name) {
  require(
      other.scalar_type() == x.scalar_type() && other.numel() == x.numel() && other.device() == x.device(),
      name, " must have x's type, device and number of elements");
}

}  // namespace nibble
