// nibble::nvfp4_moe_decode_linear and e4m3_moe_decode_linear: the launches of decode.cuh.
#include "nibble/decode_launch.h"
#include "nvfp4_moe/decode.cuh"

namespace nibble::decode {
namespace {

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    multiply_experts(const __grid_constant__ Problem problem, const __grid_constant__ Experts experts) {
  if constexpr (kIsLaunched<Form>) {
    extern __shared__ uint4 shared[];
    __shared__ Table table;
    run_experts<T, Operand, Form>(problem, experts, table, shared);
  }
}

template <class T, class Operand, class Form>
void launch(Problem problem, const Experts& experts, Device device, cudaStream_t stream) {
  device.shared_bytes -= sizeof(Table);
  problem.ranks = 1;
  problem.chunks_per_phase = chunks_per_phase<Form>(problem.chunks, Form::kTokens, device);
  const bool totals = problem.chunks_per_phase < problem.chunks;
  Launch(device.multiprocessors, 1, Form::kThreads,
         Form::shared_bytes(problem.chunks_per_phase, Form::kTokens, totals),
         stream)(multiply_experts<T, Operand, Form>, problem, experts);
}

// Calls launch(problem, experts, device, stream) for pairs of `outputs` rows, once these fit together.
template <class Format, class F>
Tensor for_pairs(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& global_scales,
                 const Tensor& choices, const std::optional<Tensor>& weights, int64_t outputs, bool silu_mul,
                 F&& launch) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t pairs = choices.numel(), inputs = x.size(0), tokens = choices.size(0), count = codes.size(0);
  require(pairs <= kMostPairs && tokens <= 16, "expected at most 16 tokens and ", kMostPairs,
          " pairs of a token and an expert, found ", tokens, " and ", pairs);
  require(choices.scalar_type() == ScalarType::Int, "ids of experts must be int32");
  require(inputs == tokens || inputs == pairs, "x has ", inputs, " rows for ", tokens, " tokens");
  const Device device = device_of(x.get_device_index());
  const Tensor out = torch::stable::new_empty(x, {pairs, silu_mul ? outputs / 2 : outputs}, x.scalar_type());
  if (pairs == 0) return out;

  Problem problem = problem_of<Format>(x, codes, outputs, scales, count);
  problem.out = out.mutable_data_ptr();
  problem.silu_mul = silu_mul;
  require(global_scales.numel() == 2 * count, "global scales are not those of prepare_experts");
  const Experts experts{static_cast<const int32_t*>(choices.const_data_ptr()),
                        weights ? static_cast<const float*>(weights->const_data_ptr()) : nullptr,
                        static_cast<const float*>(global_scales.const_data_ptr()),
                        nullptr,
                        static_cast<uint32_t>(pairs),
                        static_cast<uint32_t>(count),
                        static_cast<uint32_t>(pairs / inputs)};
  launch(problem, experts, device, current_stream(x));
  return out;
}

template <class T, class Operand, class Forms>
void launch_for(int64_t tokens, const Problem& problem, const Experts& experts, const Device& device,
                cudaStream_t stream) {
  if (tokens <= 8) return launch<T, Operand, typename Forms::Few>(problem, experts, device, stream);
  launch<T, Operand, typename Forms::Some>(problem, experts, device, stream);
}

Tensor nvfp4_moe_decode_linear(const Tensor& input, const Tensor& codes, const Tensor& scales,
                               const Tensor& global_scales, const Tensor& ids,
                               const std::optional<Tensor>& weights, int64_t outputs, bool native,
                               bool silu_mul) {
  const Tensor x = torch::stable::contiguous(input), choices = torch::stable::contiguous(ids);
  const auto run = [&](const Problem& problem, const Experts& experts, const Device& device,
                       cudaStream_t stream) {
    for_operands(x, native, [&](auto type, auto operand) {
      for_forms(device, [&](auto forms) {
        launch_for<typename decltype(type)::type, typename decltype(operand)::type, decltype(forms)>(
            choices.size(0), problem, experts, device, stream);
      });
    });
  };
  return for_pairs<Nvfp4>(x, codes, scales, global_scales, choices, weights, outputs, silu_mul, run);
}

Tensor e4m3_moe_decode_linear(const Tensor& input, const Tensor& codes, const Tensor& scales,
                              const Tensor& global_scales, const std::optional<Tensor>& row_scales,
                              const Tensor& ids, const std::optional<Tensor>& weights, int64_t outputs,
                              bool silu_mul) {
  const Tensor x = torch::stable::contiguous(input), choices = torch::stable::contiguous(ids);
  require(x.scalar_type() == ScalarType::BFloat16, "E4M3 experts need bfloat16 activations");
  require(!row_scales || row_scales->numel() == codes.size(0) * outputs,
          "expected a scale for each row of each expert");
  const auto run = [&](const Problem& problem, Experts experts, const Device& device, cudaStream_t stream) {
    experts.row_scales = row_scales ? static_cast<const float*>(row_scales->const_data_ptr()) : nullptr;
    for_forms<LargeE4m3Forms, SmallE4m3Forms>(device, [&](auto forms) {
      launch_for<__nv_bfloat16, E4m3Operand, decltype(forms)>(choices.size(0), problem, experts, device,
                                                              stream);
    });
  };
  return for_pairs<E4m3>(x, codes, scales, global_scales, choices, weights, outputs, silu_mul, run);
}

}  // namespace
}  // namespace nibble::decode

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_moe_decode_linear", TORCH_BOX(&nibble::decode::nvfp4_moe_decode_linear));
  library.impl("e4m3_moe_decode_linear", TORCH_BOX(&nibble::decode::e4m3_moe_decode_linear));
}
