// nibble::nvfp4_moe_linear: the launches of route.cuh, grouped.cuh and few.cuh.
#include "nibble/decode_launch.h"
#include "nibble/tensor_map.h"
#include "nibble/zero_words.h"
#include "nvfp4_moe/add_up.cuh"
#include "nvfp4_moe/few.cuh"
#include "nvfp4_moe/route.cuh"

namespace nibble::experts {
namespace {

using decode::Device;
using decode::Launch;

template <class Form>
__global__ void __launch_bounds__(kRouteThreads)
    order_few(const __grid_constant__ Routing routing, const __grid_constant__ Ordering ordering) {
  extern __shared__ uint16_t counts[];
  __shared__ Table table;
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  const uint32_t tiles = route_few(routing, Form::kTokens, table, counts);
  order_x<Form>(ordering, tiles, table.tiles, table.order);
}

__global__ void __launch_bounds__(kRouteThreads)
    route_all(const __grid_constant__ Routing routing, uint32_t tokens) {
  __shared__ uint64_t of_warps[kRouteWarps];
  __shared__ uint32_t counts[kMostExperts];
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  route_many(routing, tokens, of_warps, counts);
}

template <class Form>
__global__ void __launch_bounds__(kRouteThreads)
    order_many(const __grid_constant__ Routing routing, const __grid_constant__ Ordering ordering) {
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  order_x<Form>(ordering, *routing.tile_count, routing.tiles, routing.order);
}

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    multiply(const __grid_constant__ Problem problem) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(128) uint8_t shared[];
  const Multiplier<T, Operand, Form> multiplier{problem, instruction::shared_place(shared)};
  multiplier.start();
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  multiplier.run();
#endif
}

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    multiply_few(const __grid_constant__ Problem problem, const __grid_constant__ Choices choices) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ FewTable table;
  run_few<T, Operand, Form>(problem, choices, instruction::shared_place(shared), shared, table);
#endif
}

template <class T>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    add_up(const Chosen chosen, const uint4* products, uint4* out, uint32_t tokens, uint32_t pieces) {
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  add_products<T>(blockIdx.x * kSumThreads + threadIdx.x, chosen, products, out, tokens, pieces);
}

// A weight's tensors, as they lie.
struct Stored {
  const void *codes, *scales;
};

struct Run {
  Problem problem;
  Routing routing;
  Ordering ordering;
  const Tensor &x, &out;
  Stored first, second, shared_first, shared_second;
  uint32_t tokens;
  const Device& device;
  cudaStream_t stream;
};

template <class Form>
void describe(Weight& weight, const Stored& stored, uint32_t experts) {
  weight.row_blocks = quotient_up(weight.groups, Form::kGroups);
  const auto map = [&](const void* data, uint32_t words) {
    return map_of_words(data, words, weight.chunks, experts * weight.groups, Form::kStageChunks,
                        Form::kGroups);
  };
  weight.codes = map(stored.codes, kCodeBytes / 4);
  weight.scales = map(stored.scales, kScaleBytes / 4);
}

template <class Form>
void describe_all(Run& run) {
  Problem& p = run.problem;
  const Chosen& chosen = run.routing.chosen;
  p.routed = chosen.routed;
  describe<Form>(p.first, run.first, chosen.routed);
  describe<Form>(p.second, run.second, chosen.routed);
  if (!chosen.has_shared()) return;
  describe<Form>(p.shared_first, run.shared_first, 1);
  describe<Form>(p.shared_second, run.shared_second, 1);
}

template <class T>
void launch_sum(const Run& run) {
  const uint32_t pieces = run.problem.second.outputs / 8;
  Launch(quotient_up(run.tokens * pieces, kSumThreads), 1, kSumThreads, 0, run.stream)(
      add_up<T>, run.routing.chosen, static_cast<const uint4*>(run.problem.products),
      static_cast<uint4*>(run.out.mutable_data_ptr()), run.tokens, pieces);
}

template <class T, class Operand, class Form>
void multiply_with(Run& run) {
  Problem& p = run.problem;
  Routing& r = run.routing;
  Ordering& o = run.ordering;
  const uint32_t experts = r.chosen.experts();
  describe_all<Form>(run);
  const Workspace w = Workspace::of<Form>(r.pairs, experts, o.chunks, o.inner_chunks, p.second.outputs);
  r.most_tiles = p.most_tiles = w.most_tiles;
  static_assert(sizeof(T) == 2);
  const Tensor work = torch::stable::new_empty(run.x, {w.parts.bytes / 2}, run.x.scalar_type());
  uint8_t* const begin = static_cast<uint8_t*>(work.mutable_data_ptr());
  p.x = o.to = reinterpret_cast<uint4*>(begin + w.x);
  o.inner = reinterpret_cast<uint4*>(begin + w.inner);
  p.inner = reinterpret_cast<uint32_t*>(begin + w.inner);
  p.products = begin + w.products;
  p.tiles = r.tiles = reinterpret_cast<Tile*>(begin + w.tiles);
  p.pairs = r.order = reinterpret_cast<uint32_t*>(begin + w.order);
  p.weights = r.ordered_weights = reinterpret_cast<float*>(begin + w.weights);
  p.complete = r.complete = reinterpret_cast<uint32_t*>(begin + w.complete);
  p.queue = r.queue = reinterpret_cast<uint32_t*>(begin + w.counters);
  p.tile_count = r.tile_count = r.queue + 1;

  const uint32_t units = r.most_tiles * (o.chunks + 1) * Form::kTokenGroups;
  const uint32_t order_blocks = std::min(run.device.multiprocessors, quotient_up(units, kRouteWarps));
  if (r.pairs <= kFewPairs) {
    Launch(order_blocks, 1, kRouteThreads, quotient_up(r.pairs, kLanes) * experts * 2, run.stream)(
        order_few<Form>, r, o);
  } else {
    Launch(1, 1, kRouteThreads, 0, run.stream)(route_all, r, Form::kTokens);
    Launch(order_blocks * 2, 1, kRouteThreads, 0, run.stream)(order_many<Form>, r, o);
  }
  const uint32_t most_units = r.most_tiles * (p.first.row_blocks + p.second.row_blocks);
  const uint32_t blocks = std::min(run.device.multiprocessors * Form::kBlocks, most_units);
  Launch(blocks, 1, Form::kThreads, Form::kSharedBytes, run.stream)(multiply<T, Operand, Form>, p);
  launch_sum<T>(run);
}

// For few pairs: one launch before the sum.
template <class T, class Operand, class Form>
void multiply_few_with(Run& run) {
  Problem& p = run.problem;
  const Routing& r = run.routing;
  const Ordering& o = run.ordering;
  describe_all<Form>(run);
  static_assert(sizeof(T) == 2);
  const FewWorkspace w(r.pairs, o.inner_columns, p.second.outputs);
  const Tensor work = torch::stable::new_empty(run.x, {w.parts.bytes / 2}, run.x.scalar_type());
  uint8_t* const begin = static_cast<uint8_t*>(work.mutable_data_ptr());
  p.inner = reinterpret_cast<uint32_t*>(begin + w.inner);
  p.products = begin + w.products;
  const FewCounters counters(
      zero_words_of<FewCounters>(run.device.index, run.stream, FewCounters::kWords));
  p.queue = counters.queue;
  p.complete = counters.complete;
  const Choices choices{.chosen = r.chosen,
                        .x = o.x,
                        .pairs = r.pairs,
                        .columns = o.columns,
                        .inner_columns = o.inner_columns};
  const uint32_t most_tiles = std::min(r.chosen.experts() + r.pairs / Form::kTokens, r.pairs),
                 most_units = most_tiles * (p.first.row_blocks + p.second.row_blocks);
  const uint32_t blocks = std::min(run.device.multiprocessors * Form::kBlocks, most_units);
  Launch(blocks, 1, Form::kThreads, Form::kSharedBytes, run.stream)(multiply_few<T, Operand, Form>, p,
                                                                    choices);
  launch_sum<T>(run);
}

template <class T, class Operand>
void multiply_all(Run& run, int64_t form) {
  const uint32_t pairs = run.routing.pairs;
  require(form > 0 || pairs <= kMostFewPairs, "expected at most ", kMostFewPairs, " pairs, found ", pairs);
  if (form == kFew4) return multiply_few_with<T, Operand, FewForm4>(run);
  if (form == kFew8) return multiply_few_with<T, Operand, FewForm8>(run);
  if (form == 8) return multiply_with<T, Operand, Form8>(run);
  if (form == 16) return multiply_with<T, Operand, Form16>(run);
  if (form == 32) return multiply_with<T, Operand, Form32>(run);
  if (form == 64) return multiply_with<T, Operand, Form64>(run);
  require(form == 128, "expected a form of -4, -8, 8, 16, 32, 64 or 128, found ", form);
  multiply_with<T, Operand, Form128>(run);
}

Weight weight_of(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& global_scales,
                 const std::optional<Tensor>& bias, int64_t outputs, int64_t experts) {
  const decode::Problem checked = decode::problem_of(x, codes, outputs, scales, experts);
  require(global_scales.numel() == 2 * experts, "global scales are not those of prepare_experts");
  require(!bias || bias->numel() == experts * outputs, "a bias must have ", outputs, " elements an expert");
  Weight weight{};
  weight.global_scales = static_cast<const float2*>(global_scales.const_data_ptr());
  weight.bias = bias ? bias->const_data_ptr() : nullptr;
  weight.outputs = checked.outputs;
  weight.chunks = checked.chunks;
  weight.groups = checked.groups;
  return weight;
}

Stored stored_of(const Tensor& codes, const Tensor& scales) {
  return {codes.const_data_ptr(), scales.const_data_ptr()};
}

// Of a shared expert: bfloat16 [tokens], and the tensors of each weight as those of one routed expert.
struct Shared {
  const std::optional<Tensor>&weights, &w13_codes, &w13_scales, &w13_global_scales, &w2_codes, &w2_scales,
      &w2_global_scales;
};

// It is as large as a routed expert.
void take_shared(Run& run, const Shared& shared, const Tensor& like, int64_t w13_rows, int64_t w2_rows) {
  require(shared.w13_codes && shared.w13_scales && shared.w13_global_scales && shared.w2_codes &&
              shared.w2_scales && shared.w2_global_scales,
          "expected all tensors of the shared expert");
  require(!run.problem.first.bias && !run.problem.second.bias, "experts beside a shared one have no bias");
  require(shared.weights->scalar_type() == ScalarType::BFloat16 && shared.weights->is_contiguous() &&
              shared.weights->numel() == run.tokens,
          "expected a bfloat16 weight of the shared expert for each token");
  run.problem.shared_first = weight_of(run.x, *shared.w13_codes, *shared.w13_scales,
                                       *shared.w13_global_scales, std::nullopt, w13_rows, 1);
  run.problem.shared_second = weight_of(like, *shared.w2_codes, *shared.w2_scales, *shared.w2_global_scales,
                                        std::nullopt, w2_rows, 1);
  run.shared_first = stored_of(*shared.w13_codes, *shared.w13_scales);
  run.shared_second = stored_of(*shared.w2_codes, *shared.w2_scales);
  run.routing.chosen.shared_weights = static_cast<const uint16_t*>(shared.weights->const_data_ptr());
}

Tensor nvfp4_moe_linear(
    const Tensor& input, const Tensor& topk_weights, const Tensor& topk_ids, const Tensor& w13_codes,
    const Tensor& w13_scales, const Tensor& w13_global_scales, const std::optional<Tensor>& w13_bias,
    int64_t w13_rows, const Tensor& w2_codes, const Tensor& w2_scales, const Tensor& w2_global_scales,
    const std::optional<Tensor>& w2_bias, int64_t w2_rows, int64_t function, bool gated, double limit,
    double alpha, double beta, const std::optional<Tensor>& shared_weights,
    const std::optional<Tensor>& shared_w13_codes, const std::optional<Tensor>& shared_w13_scales,
    const std::optional<Tensor>& shared_w13_global_scales, const std::optional<Tensor>& shared_w2_codes,
    const std::optional<Tensor>& shared_w2_scales, const std::optional<Tensor>& shared_w2_global_scales,
    int64_t form) {
  const Tensor x = torch::stable::contiguous(input), ids = torch::stable::contiguous(topk_ids),
               weights = torch::stable::contiguous(topk_weights);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t experts = w13_codes.size(0), tokens = x.size(0), inner = gated ? w13_rows / 2 : w13_rows;
  require(x.scalar_type() == ScalarType::BFloat16, "expected bfloat16 activations");
  require(ids.scalar_type() == ScalarType::Int && weights.scalar_type() == ScalarType::Float &&
              ids.numel() == weights.numel() && ids.size(0) == tokens,
          "expected int32 ids and float32 weights of each token's experts");
  const Tensor out = torch::stable::new_empty(x, {tokens, w2_rows}, x.scalar_type());
  if (ids.numel() == 0) return torch::stable::zero_(const_cast<Tensor&>(out));
  const Device device = decode::device_of(x.get_device_index());
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index));
  require(major == 9, "nvfp4_moe_linear is for SM90, found a GPU of compute capability ", major);
  Run run{.x = x,
          .out = out,
          .first = stored_of(w13_codes, w13_scales),
          .second = stored_of(w2_codes, w2_scales),
          .tokens = static_cast<uint32_t>(tokens),
          .device = device,
          .stream = current_stream(x)};
  run.problem.first = weight_of(x, w13_codes, w13_scales, w13_global_scales, w13_bias, w13_rows, experts);
  // Only the number of columns of the intermediate matters: it has x's type.
  const Tensor like = torch::stable::new_empty(x, {1, inner}, x.scalar_type());
  run.problem.second = weight_of(like, w2_codes, w2_scales, w2_global_scales, w2_bias, w2_rows, experts);
  run.problem.activation = {static_cast<Function>(function), gated, static_cast<float>(limit),
                            static_cast<float>(alpha), static_cast<float>(beta)};
  Chosen& chosen = run.routing.chosen;
  chosen.ids = static_cast<const int32_t*>(ids.const_data_ptr());
  chosen.weights = static_cast<const float*>(weights.const_data_ptr());
  chosen.topk = static_cast<uint32_t>(ids.numel() / tokens);
  chosen.routed = static_cast<uint32_t>(experts);
  if (shared_weights) {
    take_shared(run,
                {shared_weights, shared_w13_codes, shared_w13_scales, shared_w13_global_scales,
                 shared_w2_codes, shared_w2_scales, shared_w2_global_scales},
                like, w13_rows, w2_rows);
  }
  require(chosen.experts() <= kMostExperts, "expected at most ", kMostExperts, " experts, found ",
          chosen.experts());
  run.routing.pairs = run.tokens * chosen.pairs_of_token();
  run.ordering.x = static_cast<const uint4*>(x.const_data_ptr());
  run.ordering.pairs_of_token = chosen.pairs_of_token();
  run.ordering.columns = static_cast<uint32_t>(x.size(1));
  run.ordering.chunks = run.problem.first.chunks;
  run.ordering.inner_columns = static_cast<uint32_t>(inner);
  run.ordering.inner_chunks = run.problem.second.chunks;
  multiply_all<__nv_bfloat16, BfloatOperand>(
      run, form != 0 ? form : form_of(run.routing.pairs, chosen.experts()));
  return out;
}

}  // namespace
}  // namespace nibble::experts

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_moe_linear", TORCH_BOX(&nibble::experts::nvfp4_moe_linear));
}
