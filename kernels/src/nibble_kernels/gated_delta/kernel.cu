// nibble::gated_delta_step and gated_delta_prompts on NVIDIA GPUs.
#include <array>
#include <optional>

#include "gated_delta/prompts.cuh"
#include "gated_delta/step.cuh"
#include "nibble/cuda.h"
#include "nibble/overlap.cuh"

namespace nibble::gated_delta {
namespace {

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks) step(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 memory[];
  const Place place(problem, gridDim.x * F::kHeads, blockIdx.y, blockIdx.x * F::kHeads);
  Step<F>(problem, *reinterpret_cast<Shared<F>*>(memory), blockIdx.z, place).run();
}

void check_bfloat16(const Tensor& x, const char* name) {
  require(x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous(), "expected ", name,
          " in bfloat16 without gaps");
}
const float* floats_of(const Tensor& x, int64_t count, const char* name) {
  require(x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.numel() == count, "expected ", count,
          " float32 numbers of ", name);
  return static_cast<const float*>(x.const_data_ptr());
}
template <class T = uint16_t>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

void set_states(Problem& p, const Tensor& conv_state, const Tensor& state) {
  const int64_t channels = int64_t{2 * p.key_heads + p.value_heads} * kHead;
  require(conv_state.scalar_type() == ScalarType::BFloat16 && conv_state.dim() == 3 &&
              conv_state.size(1) == channels && conv_state.size(2) >= kTaps - 1,
          "expected a bfloat16 state of the convolution [slots, ", channels, ", 3]");
  require((state.scalar_type() == ScalarType::Float || state.scalar_type() == ScalarType::BFloat16) &&
              state.dim() == 4 && state.size(1) == p.value_heads && state.size(2) == kHead &&
              state.size(3) == kHead && state.stride(3) == 1 && state.stride(2) == kHead &&
              state.stride(1) == kHead * kHead && state.stride(0) % 8 == 0,
          "expected a state [slots, ", p.value_heads, ", 128, 128] in float32 or bfloat16");
  p.conv_state = static_cast<uint16_t*>(conv_state.mutable_data_ptr());
  p.conv_slot_stride = conv_state.stride(0);
  p.conv_channel_stride = conv_state.stride(1);
  p.conv_token_stride = conv_state.stride(2);
  p.state = state.mutable_data_ptr();
  p.state_slot_stride = state.stride(0);
}

template <class F>
cudaError_t launch(const Problem& p, cudaStream_t stream) {
  const uint32_t ranks = p.value_heads / p.key_heads / F::kHeads;
  return launch_clusters_early(ranks, dim3(ranks, p.key_heads, p.tokens), F::kThreads, sizeof(Shared<F>),
                               stream, step<F>, p);
}

struct Layer {
  const Tensor &gates, &qkvz;
  bool interleaved;
  const Tensor &conv_weight, &conv_state, &state, &slots, &a_log, &dt_bias, &norm;
  double epsilon;
  bool sigmoid;
};

Problem problem_of(const Tensor& x, const Layer& layer, const Tensor& out) {
  const Tensor &gates = layer.gates, &qkvz = layer.qkvz, &slots = layer.slots;
  check_bfloat16(x, "x"), check_bfloat16(gates, "the gates' weight"), check_bfloat16(out, "the output");
  check_bfloat16(layer.conv_weight, "the convolution's weight");
  require(x.dim() == 2 && gates.dim() == 2 && gates.size(1) == x.size(1) && x.size(1) % 8 == 0,
          "expected x [T, H] and gates [2 heads, H], H a multiple of 8");
  const int64_t tokens = x.size(0), value_heads = gates.size(0) / 2;
  const int64_t channels = layer.conv_weight.numel() / kTaps, key_heads = (channels / kHead - value_heads) / 2;
  require(key_heads > 0 && value_heads % key_heads == 0 && value_heads / key_heads <= kMostShare &&
              channels == (2 * key_heads + value_heads) * kHead,
          "expected 1 to 8 value heads for each key head, found ", value_heads, " and ", key_heads);
  require(qkvz.scalar_type() == ScalarType::BFloat16 && qkvz.dim() == 2 && qkvz.stride(1) == 1 &&
              qkvz.stride(0) % 8 == 0 && qkvz.size(0) == tokens &&
              qkvz.size(1) == 2 * (key_heads + value_heads) * kHead,
          "expected rows of queries, keys, values and gates in bfloat16");
  require(slots.scalar_type() == ScalarType::Int && slots.dim() == 1, "expected int32 slots");
  require(out.numel() == tokens * value_heads * kHead, "expected room for the output");
  Problem p{};
  p.x = data(x), p.gates = data(gates), p.qkvz = data(qkvz), p.conv_weight = data(layer.conv_weight);
  p.slots = data<int32_t>(slots);
  p.slot_stride = static_cast<uint32_t>(slots.stride(0));
  p.a_log = floats_of(layer.a_log, value_heads, "a_log");
  p.dt_bias = floats_of(layer.dt_bias, value_heads, "dt_bias");
  p.norm = floats_of(layer.norm, kHead, "the norm");
  p.out = static_cast<uint16_t*>(out.mutable_data_ptr());
  p.qkvz_stride = qkvz.stride(0);
  p.tokens = static_cast<uint32_t>(tokens), p.columns = static_cast<uint32_t>(x.size(1));
  p.key_heads = static_cast<uint32_t>(key_heads), p.value_heads = static_cast<uint32_t>(value_heads);
  p.epsilon = static_cast<float>(layer.epsilon);
  p.is_interleaved = layer.interleaved, p.is_sigmoid = layer.sigmoid;
  set_states(p, layer.conv_state, layer.state);
  return p;
}

void gated_delta_step(const Tensor& x, const Tensor& gates, const Tensor& qkvz, bool interleaved,
                      const Tensor& conv_weight, Tensor conv_state, Tensor state, const Tensor& slots,
                      const Tensor& a_log, const Tensor& dt_bias, const Tensor& norm, double epsilon,
                      bool sigmoid, Tensor out) {
  Problem p = problem_of(x,
                         {gates, qkvz, interleaved, conv_weight, conv_state, state, slots, a_log, dt_bias,
                          norm, epsilon, sigmoid},
                         out);
  require(slots.numel() <= x.size(0), "expected at most one slot for each token");
  require(x.size(0) < 1 << 16, "expected at most 65535 tokens");  // of a grid
  p.live_tokens = static_cast<uint32_t>(slots.numel());
  if (p.tokens == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const bool is_float = state.scalar_type() == ScalarType::Float;
  check(with_form(p, is_float, multiprocessors_of(x),
                  [&](auto form) { return launch<decltype(form)>(p, current_stream(x)); }));
}

__global__ void __launch_bounds__(kConvolveThreads) convolve(const __grid_constant__ Prompts prompts) {
  wait_for_kernel_before();
  Convolution(prompts).run();
}
template <class State>
__global__ void __launch_bounds__(Rule<State>::kThreads) follow_rule(const __grid_constant__ Prompts prompts) {
  __shared__ typename Rule<State>::Shared shared;
  wait_for_kernel_before();
  Rule<State>(prompts, shared).run();
}
__global__ void __launch_bounds__(kNormThreads) norm_outputs(const __grid_constant__ Problem problem) {
  wait_for_kernel_before();
  norm_output(problem);
}

template <class State>
void launch_rule(const Prompts& all, cudaStream_t stream) {
  using R = Rule<State>;
  const uint32_t blocks = all.sequences * all.p.value_heads * R::kSplits;
  check(launch_early(blocks, R::kThreads, 0, stream, follow_rule<State>, all));
}

// As vLLM's linear layer computes it.
Tensor linear(const Tensor& x, const Tensor& weight) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                    torch::stable::detail::from(std::optional<Tensor>())};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void gated_delta_prompts(const Tensor& x, const Tensor& gates, const Tensor& qkvz, bool interleaved,
                         const Tensor& conv_weight, Tensor conv_state, Tensor state, const Tensor& slots,
                         const Tensor& starts, const Tensor& has_state, int64_t live_tokens,
                         const Tensor& a_log, const Tensor& dt_bias, const Tensor& norm, double epsilon,
                         bool sigmoid, Tensor out) {
  Prompts all{};
  all.p = problem_of(x,
                     {gates, qkvz, interleaved, conv_weight, conv_state, state, slots, a_log, dt_bias, norm,
                      epsilon, sigmoid},
                     out);
  Problem& p = all.p;
  require(live_tokens >= 0 && live_tokens <= x.size(0), "expected at most ", x.size(0), " tokens");
  require(starts.scalar_type() == ScalarType::Int && starts.is_contiguous() && starts.numel() >= 2 &&
              slots.numel() == starts.numel() - 1,
          "expected int32 starts, one more than slots");
  require(has_state.scalar_type() == ScalarType::Bool && has_state.is_contiguous() &&
              has_state.numel() == slots.numel(),
          "expected a bool for each sequence");
  all.starts = data<int32_t>(starts), all.has_state = data<bool>(has_state);
  all.sequences = static_cast<uint32_t>(slots.numel());
  p.live_tokens = static_cast<uint32_t>(live_tokens);
  if (p.tokens == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const Tensor ba = linear(x, gates);
  const int64_t channels = int64_t{2 * p.key_heads + p.value_heads} * kHead;
  const Tensor convolved = torch::stable::new_empty(x, {x.size(0), channels});
  const Tensor factors = torch::stable::new_empty(x, {x.size(0), 2 * p.key_heads}, ScalarType::Float);
  all.ba = data(ba);
  all.convolved = static_cast<uint16_t*>(convolved.mutable_data_ptr());
  all.factors = static_cast<float*>(factors.mutable_data_ptr());
  if (p.live_tokens > 0) {
    const uint32_t blocks = p.live_tokens * Convolution::blocks_of_token(p);
    check(launch_early(blocks, kConvolveThreads, 0, stream, convolve, all));
    const bool is_float = state.scalar_type() == ScalarType::Float;
    (is_float ? launch_rule<Floats> : launch_rule<Bfloats>)(all, stream);
  }
  const uint32_t blocks = (p.tokens * p.value_heads * kLanes + kNormThreads - 1) / kNormThreads;
  check(launch_early(blocks, kNormThreads, 0, stream, norm_outputs, p));
}

}  // namespace
}  // namespace nibble::gated_delta

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("gated_delta_step", TORCH_BOX(&nibble::gated_delta::gated_delta_step));
  library.impl("gated_delta_prompts", TORCH_BOX(&nibble::gated_delta::gated_delta_prompts));
}
