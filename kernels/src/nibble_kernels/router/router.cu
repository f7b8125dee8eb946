// nibble::route_experts and norm_route_experts on NVIDIA GPUs.
#include <array>
#include <optional>

#include "nibble/cuda.h"
#include "router/launch.cuh"

namespace nibble::router {
namespace {

struct Options {
  int64_t topk;
  bool sigmoid, renormalize;
  const std::optional<Tensor>& bias;
  double scale;
  bool round_logits;
  const std::optional<Tensor>& padding;
  int64_t groups, ranks;
};

const uint4* rows_of(const Tensor& x) { return static_cast<const uint4*>(x.const_data_ptr()); }

void check_bfloat16(const Tensor& x, const char* name) {
  require(x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous(), "expected ", name,
          " in bfloat16 without gaps");
}

template <class... Arguments>
Tensor run_operator(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// As vLLM computes them: bfloat16 from a linear layer, or float32.
Tensor logits_of(const Tensor& x, const Tensor& gate, bool round_logits) {
  if (round_logits) return run_operator("aten::linear", "", x, gate, std::optional<Tensor>());
  return run_operator("aten::mm", "dtype", x, torch::stable::transpose(gate, 0, 1), ScalarType::Float);
}

bool is_one_launch(const Problem& p, const Options& o) {
  if (o.groups != 0 || o.ranks != 0) return o.groups >= 0;
  return p.tokens <= kMostTokensAtOnce && (!p.residual || p.experts * p.columns <= kMostWeightsAtOnce);
}

// [2, tokens, topk]: weights, and ids as bits of float32. normed: the norm's result, which it may write.
Tensor choose(Problem p, const Tensor& x, const Tensor& normed, const Tensor& gate, const Options& o) {
  check_bfloat16(x, "x"), check_bfloat16(gate, "the gate's weight");
  const int64_t tokens = x.size(0), columns = x.size(1), experts = gate.size(0);
  require(x.dim() == 2 && gate.dim() == 2 && gate.size(1) == columns, "expected x [T, H] and a gate [E, H]");
  require(columns % kChunk == 0 && columns <= kMostColumns && experts <= kMostExperts,
          "expected a multiple of 32 columns up to ", int64_t{kMostColumns}, " and up to ",
          int64_t{kMostExperts}, " experts, found ", columns, " and ", experts);
  require(o.topk >= 1 && o.topk <= kMostChosen && o.topk <= experts, "expected 1 to ", int64_t{kMostChosen},
          " of the experts, found ", o.topk);
  require(!o.bias || (o.bias->scalar_type() == ScalarType::Float && o.bias->numel() == experts),
          "expected a float32 bias for each expert");
  require(!o.padding || (o.padding->scalar_type() == ScalarType::Bool && o.padding->numel() >= tokens),
          "expected a bool for each token");
  require((o.groups == -1 || o.groups == 0 || o.groups == 1 || o.groups == 2 || o.groups == 4) &&
              o.ranks >= 0 && o.ranks <= kMostRanks && (o.ranks & (o.ranks - 1)) == 0,
          "expected 1, 2 or 4 groups and 1, 2, 4 or 8 ranks, or -1 groups");
  const Tensor choices = torch::stable::new_empty(x, {2, tokens, o.topk}, ScalarType::Float);
  if (tokens == 0) return choices;
  p.x = rows_of(x), p.gate = rows_of(gate);
  p.bias = o.bias ? static_cast<const float*>(o.bias->const_data_ptr()) : nullptr;
  p.padding = o.padding ? static_cast<const bool*>(o.padding->const_data_ptr()) : nullptr;
  p.weights = static_cast<float*>(choices.mutable_data_ptr());
  p.ids = reinterpret_cast<int32_t*>(p.weights + tokens * o.topk);
  p.tokens = static_cast<uint32_t>(tokens), p.experts = static_cast<uint32_t>(experts);
  p.columns = static_cast<uint32_t>(columns), p.topk = static_cast<uint32_t>(o.topk);
  p.scale = static_cast<float>(o.scale);
  p.sigmoid = o.sigmoid, p.renormalize = o.renormalize, p.round_logits = o.round_logits;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  if (is_one_launch(p, o)) {
    check(launch(p, static_cast<uint32_t>(o.groups), static_cast<uint32_t>(o.ranks), x.get_device_index(),
                 stream));
    return choices;
  }
  if (p.residual) check(launch_norm(p, stream));
  const Tensor logits = logits_of(normed, gate, o.round_logits);
  p.logits = logits.const_data_ptr();
  check(launch_choice(p, stream));
  return choices;
}

Tensor route_experts(const Tensor& x, const Tensor& gate, int64_t topk, bool sigmoid, bool renormalize,
                     const std::optional<Tensor>& bias, double scale, bool round_logits,
                     const std::optional<Tensor>& padding, int64_t groups, int64_t ranks) {
  const Tensor rows = torch::stable::contiguous(x);
  return choose(Problem{}, rows, rows, gate,
                {topk, sigmoid, renormalize, bias, scale, round_logits, padding, groups, ranks});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_route_experts(
    const Tensor& input, const Tensor& residual, const Tensor& norm, double epsilon, double norm_offset,
    const std::optional<Tensor>& shared_gate, const Tensor& gate, int64_t topk, bool sigmoid,
    bool renormalize, const std::optional<Tensor>& bias, double scale, bool round_logits,
    const std::optional<Tensor>& padding, int64_t groups, int64_t ranks) {
  const Tensor x = torch::stable::contiguous(input), rest = torch::stable::contiguous(residual);
  check_same(x, rest, "the residual");
  check_bfloat16(norm, "the norm's weight");
  require(norm.numel() == x.size(1), "expected a weight of the norm for each column");
  const Tensor normed = torch::stable::empty_like(x), sum = torch::stable::empty_like(x);
  Problem p{};
  p.residual = rows_of(rest), p.norm = rows_of(norm);
  p.normed = static_cast<uint4*>(normed.mutable_data_ptr());
  p.sum = static_cast<uint4*>(sum.mutable_data_ptr());
  p.epsilon = static_cast<float>(epsilon), p.norm_offset = static_cast<float>(norm_offset);
  const Tensor factors = torch::stable::new_empty(x, {shared_gate ? x.size(0) : 0, 1}, x.scalar_type());
  if (shared_gate) {
    check_bfloat16(*shared_gate, "the shared expert's gate");
    require(shared_gate->numel() == x.size(1), "expected a gate of the shared expert for each column");
    p.shared_gate = rows_of(*shared_gate);
    p.shared_factors = static_cast<uint16_t*>(factors.mutable_data_ptr());
  }
  const Tensor choices = choose(
      p, x, normed, gate, {topk, sigmoid, renormalize, bias, scale, round_logits, padding, groups, ranks});
  return {normed, sum, choices, factors};
}

}  // namespace
}  // namespace nibble::router

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("route_experts", TORCH_BOX(&nibble::router::route_experts));
  library.impl("norm_route_experts", TORCH_BOX(&nibble::router::norm_route_experts));
}
