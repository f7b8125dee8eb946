// nibble::nvfp4_w4a4_moe: checks of its arguments and the launches (w4a4_launch.cuh).
#include <optional>

#include "nibble/cuda.h"
#include "nvfp4_moe/w4a4_launch.cuh"

namespace nibble::w4a4_experts {
namespace {

// `columns` of x or of the intermediate.
Weight weight_of(const Tensor& codes, const Tensor& scales, const Tensor& global_scales,
                 const Tensor& input_scales, const std::optional<Tensor>& bias, int64_t outputs,
                 int64_t columns, int64_t experts) {
  require(columns % 16 == 0 && outputs % 8 == 0, "expected columns in 16s and outputs in 8s, found ", columns,
          " and ", outputs);
  Weight weight{};
  weight.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  weight.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  weight.global_scales = static_cast<const float2*>(global_scales.const_data_ptr());
  weight.input_scales = static_cast<const float*>(input_scales.const_data_ptr());
  weight.bias = bias ? bias->const_data_ptr() : nullptr;
  weight.outputs = static_cast<uint32_t>(outputs);
  weight.columns = static_cast<uint32_t>(columns);
  divide(weight);
  const int64_t tiles = experts * weight.groups * weight.chunks;
  require(codes.numel() == tiles * w4a4::kCodeBytes && scales.numel() == tiles * w4a4::kScaleBytes,
          "weights of ", outputs, " by ", columns, " are not what prepare_experts was given");
  require(global_scales.numel() == 2 * experts, "global scales are not those of prepare_experts");
  require(input_scales.scalar_type() == ScalarType::Float && input_scales.numel() == experts,
          "expected a float32 input scale for each of ", experts, " experts");
  require(!bias || bias->numel() == experts * outputs, "a bias must have ", outputs, " elements an expert");
  return weight;
}

Tensor nvfp4_w4a4_moe(const Tensor& input, const Tensor& topk_weights, const Tensor& topk_ids,
                      const Tensor& w13_codes, const Tensor& w13_scales, const Tensor& w13_global_scales,
                      const Tensor& w13_input_scale, const std::optional<Tensor>& w13_bias, int64_t w13_rows,
                      const Tensor& w2_codes, const Tensor& w2_scales, const Tensor& w2_global_scales,
                      const Tensor& w2_input_scale, const std::optional<Tensor>& w2_bias, int64_t w2_rows,
                      int64_t function, bool gated, double limit, double alpha, double beta, int64_t form) {
  const Tensor x = torch::stable::contiguous(input), ids = torch::stable::contiguous(topk_ids),
               weights = torch::stable::contiguous(topk_weights);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t experts = w13_codes.size(0), tokens = x.size(0), inner = gated ? w13_rows / 2 : w13_rows;
  require(x.scalar_type() == ScalarType::BFloat16, "expected bfloat16 activations");
  require(ids.scalar_type() == ScalarType::Int && weights.scalar_type() == ScalarType::Float &&
              ids.numel() == weights.numel() && ids.size(0) == tokens,
          "expected int32 ids and float32 weights of each token's experts");
  require(experts <= kMostExperts, "expected at most ", kMostExperts, " experts, found ", experts);
  require(w2_rows == x.size(1), "expected w2 of ", x.size(1), " rows, found ", w2_rows);
  const Tensor out = torch::stable::new_empty(x, {tokens, w2_rows}, x.scalar_type());
  if (ids.numel() == 0) return torch::stable::zero_(const_cast<Tensor&>(out));
  Layer layer{};
  layer.x = static_cast<const uint4*>(x.const_data_ptr());
  layer.ids = static_cast<const int32_t*>(ids.const_data_ptr());
  layer.weights = static_cast<const float*>(weights.const_data_ptr());
  layer.out = static_cast<uint4*>(out.mutable_data_ptr());
  layer.tokens = static_cast<uint32_t>(tokens);
  layer.topk = static_cast<uint32_t>(ids.numel() / tokens);
  layer.experts = static_cast<uint32_t>(experts);
  layer.first = weight_of(w13_codes, w13_scales, w13_global_scales, w13_input_scale, w13_bias, w13_rows,
                          x.size(1), experts);
  layer.second =
      weight_of(w2_codes, w2_scales, w2_global_scales, w2_input_scale, w2_bias, w2_rows, inner, experts);
  layer.activation = {static_cast<experts::Function>(function), gated, static_cast<float>(limit),
                      static_cast<float>(alpha), static_cast<float>(beta)};
  const uint32_t multiprocessors = multiprocessors_of(x);
  const cudaStream_t stream = current_stream(x);
  const bool instructions = use_instructions(x.get_device_index(), stream);
  const uint32_t tile = form != 0 ? static_cast<uint32_t>(form)
                                  : tokens_of_a_tile(layer.pairs(), layer.experts);
  require(tile == 16 || tile == 32 || tile == 64 || tile == 128,
          "expected a form of 16, 32, 64 or 128 tokens, found ", form);
  for_form(tile, [&]<class Form>(Form) {
    for_bool(instructions, [&](auto with_instructions) {
      using Convert = std::conditional_t<decltype(with_instructions)::value, Instructions, Software>;
      const Launches<__nv_bfloat16, Form, Convert> launches(layer, multiprocessors);
      const Tensor work =
          torch::stable::new_empty(x, {static_cast<int64_t>(launches.bytes())}, ScalarType::Byte);
      check(launches.all(work.mutable_data_ptr(), stream));
    });
  });
  return out;
}

}  // namespace
}  // namespace nibble::w4a4_experts

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_w4a4_moe", TORCH_BOX(&nibble::w4a4_experts::nvfp4_w4a4_moe));
}
