// nibble::fp8_linear: checks of its arguments and the launch (small_launch.cuh).
#include <optional>

#include "fp8_linear/small_launch.cuh"
#include "nibble/cuda.h"

namespace nibble::fp8 {
namespace {

Problem problem_of(const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
                   bool blockwise) {
  const int64_t columns = weight.size(1), outputs = weight.size(0), tokens = x.numel() / columns;
  const int64_t chunks = (columns + kChunk - 1) / kChunk;
  require(columns % 16 == 0 && x.size(x.dim() - 1) == columns, "expected rows of a multiple of 16 columns, of ",
          "x as of the weight, found ", columns);
  require(x_scale.scalar_type() == ScalarType::Float && weight_scale.scalar_type() == ScalarType::Float,
          "scales must be float32");
  if (blockwise) {
    require(x_scale.numel() == tokens * chunks &&
                weight_scale.numel() == (outputs + kChunk - 1) / kChunk * chunks,
            "expected a scale for each 128 columns of a token and for each 128 by 128 of the weight");
  } else {
    require((x_scale.numel() == 1 || x_scale.numel() == tokens) &&
                (weight_scale.numel() == 1 || weight_scale.numel() == outputs),
            "expected one scale, or one for each token and each row of the weight");
  }
  return {static_cast<const uint8_t*>(x.const_data_ptr()),
          static_cast<const uint8_t*>(weight.const_data_ptr()),
          static_cast<const float*>(x_scale.const_data_ptr()),
          static_cast<const float*>(weight_scale.const_data_ptr()),
          nullptr,
          nullptr,
          static_cast<uint32_t>(tokens),
          static_cast<uint32_t>(outputs),
          static_cast<uint32_t>(columns),
          static_cast<uint32_t>(chunks),
          x_scale.numel() == 1,
          weight_scale.numel() == 1};
}

Tensor fp8_linear(const Tensor& input, const Tensor& input_weight, const Tensor& input_x_scale,
                  const Tensor& input_weight_scale, const std::optional<Tensor>& bias, bool blockwise,
                  bool half) {
  using torch::stable::contiguous;
  const Tensor x = contiguous(input), weight = contiguous(input_weight);
  const Tensor x_scale = contiguous(input_x_scale), weight_scale = contiguous(input_weight_scale);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Problem p = problem_of(x, weight, x_scale, weight_scale, blockwise);
  const Tensor out = torch::stable::new_empty(x, with_last(x, weight.size(0)),
                                              half ? ScalarType::Half : ScalarType::BFloat16);
  p.bias = bias ? bias->const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  const cudaStream_t stream = current_stream(x);
  for_bool(blockwise, [&](auto blocks) {
    constexpr bool kBlockwise = decltype(blocks)::value;
    check(half ? launch<__half, kBlockwise>(p, stream) : launch<__nv_bfloat16, kBlockwise>(p, stream));
  });
  return out;
}

}  // namespace
}  // namespace nibble::fp8

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("fp8_linear", TORCH_BOX(&nibble::fp8::fp8_linear));
}
