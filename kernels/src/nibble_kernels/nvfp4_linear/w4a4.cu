// nibble::nvfp4_w4a4_linear and nvfp4_w4a4_weight_linear: checks of their arguments and the launches
// (w4a4_launch.cuh).
#include <array>
#include <optional>

#include "nibble/cuda.h"
#include "nvfp4_linear/w4a4_launch.cuh"

namespace nibble::w4a4 {
namespace {

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

Problem problem_of(const Tensor& x, const Tensor& x_scales, const Tensor& codes, const Tensor& scales,
                   int64_t outputs) {
  const int64_t columns = 2 * x.size(x.dim() - 1), tokens = x.numel() / (columns / 2);
  require(columns % 32 == 0 && outputs % 8 == 0, "expected columns in 32s and outputs in 8s, found ", columns,
          " and ", outputs);
  Problem p{};
  p.x = static_cast<const uint8_t*>(x.const_data_ptr());
  p.x_scales = static_cast<const uint8_t*>(x_scales.const_data_ptr());
  p.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  p.output.outputs = static_cast<uint32_t>(outputs);
  p.columns = static_cast<uint32_t>(columns);
  p.tokens = static_cast<uint32_t>(tokens);
  const int64_t tiles =
      ((outputs / 2 + kGroup - 1) / kGroup) * ((columns + kChunk - 1) / kChunk);
  require(codes.numel() == tiles * kCodeBytes && scales.numel() == tiles * kScaleBytes, "a weight of ",
          outputs, " by ", columns, " is not what prepare_weight was given");
  require(x_scales.dim() == 2 && x_scales.size(0) == round_up<int64_t>(tokens, kTileRows) &&
              x_scales.size(1) == round_up<int64_t>(columns / kBlock, kTileBlocks),
          "expected scales of ", tokens, " by ", columns, " in 128x4 tiles");
  return p;
}

Tensor nvfp4_w4a4_linear(const Tensor& x_codes, const Tensor& x_scales, const Tensor& codes,
                         const Tensor& scales, int64_t outputs, double global_scale,
                         const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& residual, bool silu_mul, bool half) {
  const Tensor x = torch::stable::contiguous(x_codes), tiled = torch::stable::contiguous(x_scales);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Problem p = problem_of(x, tiled, codes, scales, outputs);
  const auto type = half ? ScalarType::Half : ScalarType::BFloat16;
  const Tensor out = torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), type);
  require(!residual || (residual->numel() == out.numel() && residual->is_contiguous() &&
                        residual->scalar_type() == out.scalar_type()),
          "a residual must have the result's shape and type");
  if (p.tokens == 0) return out;
  p.output.column_scale = static_cast<const float*>(data_or_null(column_scale));
  p.output.bias = data_or_null(bias);
  p.output.residual = data_or_null(residual);
  p.output.out = out.mutable_data_ptr();
  p.output.global_scale = static_cast<float>(global_scale);
  p.output.silu_mul = silu_mul;
  const uint32_t multiprocessors = multiprocessors_of(x);
  const cudaStream_t stream = current_stream(x);
  std::optional<Tensor> work;  // the first slice needs the most
  for (uint32_t first = 0; first < p.tokens; first += kMostTokens) {
    Problem slice = p.slice(first, kMostTokens);
    const uint32_t blocks = divide(slice, multiprocessors);
    if (!work) {
      work = torch::stable::new_empty(
          x, {static_cast<int64_t>(part_bytes(slice.tokens, blocks) + flag_bytes(blocks))}, ScalarType::Byte);
    }
    check(half ? launch<__half>(slice, blocks, work->mutable_data_ptr(), stream)
               : launch<__nv_bfloat16>(slice, blocks, work->mutable_data_ptr(), stream));
  }
  return out;
}

// Quantizes x and multiplies. A choice or two calls in Python take longer than a small model's kernels.
Tensor nvfp4_w4a4_weight_linear(const Tensor& x, const Tensor& input_scale_inv, const Tensor& codes,
                                const Tensor& scales, int64_t outputs, double global_scale,
                                const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& residual, bool silu_mul) {
  const bool half = x.scalar_type() == ScalarType::Half;
  require(half || x.scalar_type() == ScalarType::BFloat16, "expected bfloat16 or float16 activations");
  std::array<StableIValue, 4> stack{
      torch::stable::detail::from(x), torch::stable::detail::from(input_scale_inv),
      torch::stable::detail::from(true), torch::stable::detail::from(true)};  // tiled, exact
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("nibble::nvfp4_quant", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor x_codes = torch::stable::detail::to<Tensor>(stack[0]);
  const Tensor x_scales = torch::stable::detail::to<Tensor>(stack[1]);
  return nvfp4_w4a4_linear(x_codes, x_scales, codes, scales, outputs, global_scale, column_scale, bias,
                           residual, silu_mul, half);
}

}  // namespace
}  // namespace nibble::w4a4

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_w4a4_linear", TORCH_BOX(&nibble::w4a4::nvfp4_w4a4_linear));
  library.impl("nvfp4_w4a4_weight_linear", TORCH_BOX(&nibble::w4a4::nvfp4_w4a4_weight_linear));
}
