// nibble::nvfp4_warpgroup_linear, and the same product of an x in order: how the work is divided, and the launches.
#include "nibble/decode_launch.h"
#include "nibble/tensor_map.h"
#include "nibble/zero_words.h"
#include "nvfp4_linear/linear.h"
#include "nvfp4_linear/warpgroup.cuh"
#include "nvfp4_linear/warpgroup_division.h"

namespace nibble::warpgroup {
namespace {

using decode::Device;
using decode::Launch;

constexpr uint32_t kOrderWarps = 4;

// x [tokens, columns] in order (warpgroup_form.h), zeros past the last token and column. A warp has 8 tokens of a
// chunk.
template <uint32_t Tokens>
__global__ void __launch_bounds__(kOrderWarps* kLanes)
    order_x(const uint4* x, uint4* to, uint32_t tokens, uint32_t columns, uint32_t chunks) {
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  const uint32_t unit = blockIdx.x * kOrderWarps + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t token_group = unit / chunks, chunk = unit - token_group * chunks;
  const uint32_t token = token_group * kTokenGroup + lane % kTokenGroup, piece = lane / kTokenGroup;
  if (token / Tokens * Tokens >= tokens) return;
  const uint32_t first_column = chunk * kChunk + piece * 8;
  uint4 quarters[4];
  load_quarters(x + (size_t{token} * columns + first_column) / 8, quarters,
                [&](uint32_t t) { return token < tokens && first_column + t * 32 < columns; });
  to += piece_place(token, chunk, piece * 4, Tokens, chunks);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) to[i * Tokens] = ordered(quarters, i);
}

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) multiply_block(const __grid_constant__ Problem problem) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(128) uint8_t shared[];
  Multiplier<T, Operand, Form>{problem, instruction::shared_place(shared)}.run();
#endif
}

// Boxes of `box_rows` rows of `words` words, from a matrix whose rows are `chunks` times as long.
CUtensorMap map_of(const void* data, uint32_t words, uint32_t chunks, uint32_t rows, uint32_t box_rows) {
  CUtensorMap map{};
  const cuuint64_t sizes[] = {uint64_t{words} * chunks, rows}, bytes[] = {uint64_t{words} * chunks * 4};
  const cuuint32_t box[] = {words, box_rows}, steps[] = {1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<void*>(data), sizes, bytes, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result));
  return map;
}

struct Run {
  Problem& problem;
  Norm norm;
  const void *codes, *scales;
  const Tensor& x;
  Input input;
  const Device& device;
  const std::vector<int64_t>& division;
  cudaStream_t stream;
  uint32_t blocks = 0;  // of the launch
};

template <class T, class Operand, class Form>
void multiply_with(Run& run, uint32_t clusters, uint32_t ranks) {
  Problem& p = run.problem;
  p.ranks = ranks;
  p.codes = map_of(run.codes, kCodeBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.scales = map_of(run.scales, kScaleBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.x = static_cast<const uint4*>(run.x.const_data_ptr());
  std::optional<Tensor> ordered, parts;
  if (!Form::kOrdersX && run.input == Input::rows) {
    const int64_t rows = int64_t{p.token_tiles} * Form::kTokens;
    ordered = torch::stable::new_empty(run.x, {rows * p.chunks * kChunk}, run.x.scalar_type());
    uint4* const to = static_cast<uint4*>(ordered->mutable_data_ptr());
    const uint32_t warps = p.token_tiles * Form::kTokenGroups * p.chunks;
    Launch order(quotient_up(warps, kOrderWarps), 1, kOrderWarps * kLanes, 0, run.stream);
    order(order_x<Form::kTokens>, p.x, to, p.tokens, p.columns, p.chunks);
    p.x = to;
  }
  if constexpr (Form::kRanges) {
    const int64_t bytes = int64_t{clusters} * Form::kSlots * Form::kSlotBytes;
    parts = torch::stable::new_empty(run.x, {bytes / 2}, run.x.scalar_type());
    p.parts = static_cast<float4*>(parts->mutable_data_ptr());
    constexpr uint32_t kMostWarps = 16;  // of a block, in every form
    static_assert(Form::kConsumerWarps <= kMostWarps);
    p.flags = zero_words_of<Division>(run.device.index, run.stream, run.device.multiprocessors * kMostWarps);
  }
  run.blocks = clusters * ranks;
  Launch launch(run.blocks, ranks, Form::kThreads, Form::shared_bytes(ranks), run.stream);
  launch(multiply_block<T, Operand, Form>, p);
}

// The division for a form. Those that Run.division leaves, if it is not empty.
template <class T, class Operand, class Forms>
std::optional<Division> division_for(const Run& run) {
  const Problem& p = run.problem;
  return division_of<Forms>(
      {p.tokens, p.groups, p.chunks, run.input}, run.device.multiprocessors,
      [&](uint32_t ranks) {
        using Clusters = typename Forms::Clusters;
        return decode::clusters_at_a_time<multiply_block<T, Operand, Clusters>>(
            ranks, Clusters::kThreads, Clusters::shared_bytes(ranks), run.device);
      },
      [&](Sharing sharing, uint32_t ranks) {
        return run.division.empty() || (run.division[2] == static_cast<int64_t>(sharing) &&
                                        run.division[3] == static_cast<int64_t>(ranks));
      });
}

template <class T, class Operand, class Forms, Norm Beside>
void multiply_beside(Run& run, const Division& division) {
  if constexpr (Forms::kHasClusters) {
    if (division.sharing == Sharing::clusters)
      return multiply_with<T, Operand, typename Forms::template Of<Sharing::clusters, Beside>>(
          run, division.clusters, division.ranks);
  }
  if (division.sharing == Sharing::ranges)
    return multiply_with<T, Operand, typename Forms::template Of<Sharing::ranges, Beside>>(run, division.clusters,
                                                                                          1);
  multiply_with<T, Operand, typename Forms::template Of<Sharing::units, Beside>>(run, division.clusters, 1);
}

template <class T, class Operand, class Forms>
void multiply_as(Run& run, const Division& division) {
  Problem& p = run.problem;
  const Shape shape{p.tokens, p.groups, p.chunks, run.input};
  p.row_blocks = shape.row_blocks<Forms>();
  p.token_tiles = shape.token_tiles<Forms>();
  if constexpr (Forms::kTokens <= kMostNormTokens && std::is_same_v<T, __nv_bfloat16>) {
    if (run.norm == Norm::after) return multiply_beside<T, Operand, Forms, Norm::after>(run, division);
    if constexpr (!Forms::Units::kOrdersX) {
      if (run.norm == Norm::before) return multiply_beside<T, Operand, Forms, Norm::before>(run, division);
    }
  }
  require(run.norm == Norm::none, "expected at most ", kMostNormTokens, " tokens of bfloat16 beside a norm");
  multiply_beside<T, Operand, Forms, Norm::none>(run, division);
}

template <class T, class Operand>
void multiply_all(Run& run) {
  std::optional<Division> best;
  void (*multiply_best)(Run&, const Division&) = nullptr;
  for_every_form([&](auto forms) {
    using Considered = decltype(forms);
    const bool is_considered =
        run.division.empty()
            ? Considered::is_for(run.problem.tokens, run.input)
            : run.division[0] == Considered::kTokens && run.division[1] == Considered::kRows;
    if (!is_considered) return;
    const std::optional<Division> found = division_for<T, Operand, Considered>(run);
    if (!found || (best && best->cost <= found->cost)) return;
    best = found;
    multiply_best = multiply_as<T, Operand, Considered>;
  });
  require(best.has_value(), "no such division of ", run.problem.chunks, " chunks here");
  multiply_best(run, *best);
}

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

struct Product {
  const Tensor& x;  // [.., columns] in rows, or in order
  Input input;
  int64_t tokens;
  const Weight& weight;
  const std::optional<Tensor>& residual;
  bool silu_mul, ordered_result;
  const std::vector<int64_t>& division;
  const Tensor& out;
};

// `beside` sets up the problem's part of a norm. Returns the number of thread blocks.
template <class F>
uint32_t multiply(const Product& product, Norm norm, F&& beside) {
  const Tensor& x = product.x;
  const Weight& weight = product.weight;
  if (product.tokens == 0) return 0;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = decode::device_of(x.get_device_index());
  const decode::Problem checked = decode::problem_of(x, weight.codes, weight.outputs, weight.scales, 1);
  const std::optional<Tensor>& residual = product.residual;
  const Tensor& out = product.out;
  Problem problem{};
  problem.output.column_scale = static_cast<const float*>(data_or_null(weight.column_scale));
  problem.output.bias = data_or_null(weight.bias);
  require(!residual || (residual->numel() == out.numel() && residual->is_contiguous() &&
                        residual->scalar_type() == out.scalar_type()),
          "a residual must have the result's shape and type");
  problem.output.residual = data_or_null(residual);
  problem.output.out = out.mutable_data_ptr();
  problem.output.global_scale = static_cast<float>(weight.global_scale);
  problem.output.outputs = checked.outputs;
  problem.output.silu_mul = product.silu_mul;
  problem.output.ordered = product.ordered_result;
  problem.columns = checked.columns;
  problem.chunks = checked.chunks;
  problem.groups = checked.groups;
  problem.tokens = static_cast<uint32_t>(product.tokens);
  beside(problem);
  const std::vector<int64_t>& division = product.division;
  require(division.empty() || division.size() == 4,
          "expected a division of tokens, rows, sharing and blocks of a cluster, found ", division.size(),
          " numbers");
  require(weight.native == (x.scalar_type() == ScalarType::Half),
          "expected codes prepared for the activations' type");
  Run run{problem, norm, checked.codes, checked.scales, x, product.input, device, division, current_stream(x)};
  if (weight.native) {
    multiply_all<__half, HalfOperand>(run);
  } else {
    multiply_all<__nv_bfloat16, BfloatOperand>(run);
  }
  return run.blocks;
}

}  // namespace

Tensor nvfp4_warpgroup_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                              bool native, double global_scale, const std::optional<Tensor>& column_scale,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                              bool silu_mul, const std::vector<int64_t>& division) {
  const Tensor x = torch::stable::contiguous(input);
  const Tensor out =
      torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), x.scalar_type());
  const Weight weight{codes, scales, outputs, native, global_scale, column_scale, bias};
  multiply({x, Input::rows, x.numel() / x.size(x.dim() - 1), weight, residual, silu_mul, false, division, out},
           Norm::none, [](Problem&) {});
  return out;
}

uint32_t ordered_tile(int64_t tokens) { return tile_of(static_cast<uint32_t>(tokens), Input::ordered); }

Tensor ordered_like(const Tensor& like, int64_t tokens, int64_t columns) {
  const int64_t tile = ordered_tile(tokens);
  return torch::stable::new_empty(like, {(tokens + tile - 1) / tile * tile, columns}, like.scalar_type());
}

void multiply_ordered(const Tensor& x, int64_t tokens, const Weight& weight, const std::optional<Tensor>& residual,
                      bool silu_mul, bool ordered_result, const Tensor& out) {
  multiply({x, Input::ordered, tokens, weight, residual, silu_mul, ordered_result, {}, out}, Norm::none,
           [](Problem&) {});
}

Unscaled multiply_before_norm(const Tensor& x, bool is_ordered, int64_t tokens, const Weight& weight,
                              const Tensor& residual, const Tensor& norm_weight, const Tensor& out) {
  require_norm(norm_weight, weight, out);
  const int64_t tile = ordered_tile(tokens), most = decode::device_of(x.get_device_index()).multiprocessors;
  Unscaled unscaled{ordered_like(out, tokens, weight.outputs),
                    torch::stable::new_empty(out, {most, tile}, ScalarType::Float), 0};
  const Input input = is_ordered ? Input::ordered : Input::rows;
  unscaled.parts = multiply({x, input, tokens, weight, residual, false, false, {}, out}, Norm::after, [&](Problem& p) {
    p.output.norm = norm_after(unscaled, norm_weight);
  });
  require(unscaled.parts <= most, "expected a thread block a multiprocessor, found ", unscaled.parts);
  return unscaled;
}

void multiply_after_norm(const Unscaled& x, double epsilon, int64_t tokens, const Weight& weight, bool silu_mul,
                         bool ordered_result, const Tensor& out) {
  multiply({x.x, Input::ordered, tokens, weight, {}, silu_mul, ordered_result, {}, out}, Norm::before,
           [&](Problem& p) {
             p.norm = norm_before(x, epsilon);
           });
}

}  // namespace nibble::warpgroup

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_warpgroup_linear", TORCH_BOX(&nibble::warpgroup::nvfp4_warpgroup_linear));
}
