// nibble::nvfp4_warpgroup_linear: x in the order of warpgroup.cuh, how the work is divided, and the launches.
#include "nibble/decode_launch.h"
#include "nibble/tensor_map.h"
#include "nvfp4_linear/linear.h"
#include "nvfp4_linear/warpgroup.cuh"
#include "nvfp4_linear/warpgroup_division.h"

namespace nibble::warpgroup {
namespace {

using decode::Device;
using decode::Launch;

constexpr uint32_t kOrderWarps = 4;

// x [tokens, columns] as [tiles, chunks, steps, 2, Tokens] pieces of 16 bytes, zeros past the last token and
// column. A warp has 8 tokens of a chunk.
template <uint32_t Tokens>
__global__ void __launch_bounds__(kOrderWarps* kLanes)
    order_x(const uint4* x, uint4* to, uint32_t tokens, uint32_t columns, uint32_t chunks, uint32_t* flags,
            uint32_t flag_count) {
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < flag_count; i += gridDim.x * blockDim.x)
    flags[i] = 0;
  const uint32_t unit = blockIdx.x * kOrderWarps + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t token_group = unit / chunks, chunk = unit - token_group * chunks;
  const uint32_t token = token_group * kTokenGroup + lane % kTokenGroup, piece = lane / kTokenGroup;
  const uint32_t tile = token / Tokens;
  if (tile * Tokens >= tokens) return;
  const uint32_t first_column = chunk * kChunk + piece * 8;
  uint4 quarters[4];
  load_quarters(x + (size_t{token} * columns + first_column) / 8, quarters,
                [&](uint32_t t) { return token < tokens && first_column + t * 32 < columns; });
  to += ((size_t{tile} * chunks + chunk) * kSteps + piece * 2) * 2 * Tokens + token % Tokens;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) to[i * Tokens] = ordered(quarters, i);
}

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
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
  Problem problem;
  const void *codes, *scales;
  const Tensor& x;
  const Device& device;
  const std::vector<int64_t>& division;
  cudaStream_t stream;
};

template <class T, class Operand, class Form>
void multiply_with(Run& run, uint32_t clusters, uint32_t ranks) {
  Problem& p = run.problem;
  p.ranks = ranks;
  p.codes = map_of(run.codes, kCodeBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.scales = map_of(run.scales, kScaleBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.x = static_cast<const uint4*>(run.x.const_data_ptr());
  std::optional<Tensor> work;
  if constexpr (!Form::kOrdersX) {
    const int64_t x_bytes = int64_t{p.token_tiles} * p.chunks * Form::kXBytes;
    const int64_t part_bytes = Form::kRanges ? int64_t{clusters} * Form::kSlots * Form::kSlotBytes : 0;
    const uint32_t flags = Form::kRanges ? clusters * Form::kConsumerWarps : 0;
    work = torch::stable::new_empty(run.x, {(x_bytes + part_bytes + flags * 4) / 2}, run.x.scalar_type());
    uint8_t* const begin = static_cast<uint8_t*>(work->mutable_data_ptr());
    p.parts = reinterpret_cast<float4*>(begin + x_bytes);
    p.flags = reinterpret_cast<uint32_t*>(begin + x_bytes + part_bytes);
    const uint32_t warps = p.token_tiles * Form::kTokenGroups * p.chunks;
    Launch order(quotient_up(warps, kOrderWarps), 1, kOrderWarps * kLanes, 0, run.stream);
    order(order_x<Form::kTokens>, p.x, reinterpret_cast<uint4*>(begin), p.tokens, p.columns, p.chunks,
          p.flags, flags);
    p.x = reinterpret_cast<const uint4*>(begin);
  }
  Launch launch(clusters * ranks, ranks, Form::kThreads, Form::shared_bytes(ranks), run.stream);
  launch(multiply<T, Operand, Form>, p);
}

// The division for a form. Those that Run.division leaves, if it is not empty.
template <class T, class Operand, class Forms>
std::optional<Division> division_for(const Run& run) {
  const Problem& p = run.problem;
  return division_of<Forms>(
      {p.tokens, p.groups, p.chunks}, run.device.multiprocessors,
      [&](uint32_t ranks) {
        using Clusters = typename Forms::Clusters;
        return decode::clusters_at_a_time<multiply<T, Operand, Clusters>>(
            ranks, Clusters::kThreads, Clusters::shared_bytes(ranks), run.device);
      },
      [&](Sharing sharing, uint32_t ranks) {
        return run.division.empty() || (run.division[2] == static_cast<int64_t>(sharing) &&
                                        run.division[3] == static_cast<int64_t>(ranks));
      });
}

template <class T, class Operand, class Forms>
void multiply_as(Run& run, const Division& division) {
  Problem& p = run.problem;
  const Shape shape{p.tokens, p.groups, p.chunks};
  p.row_blocks = shape.row_blocks<Forms>();
  p.token_tiles = shape.token_tiles<Forms>();
  if constexpr (Forms::kHasClusters) {
    if (division.sharing == Sharing::clusters)
      return multiply_with<T, Operand, typename Forms::Clusters>(run, division.clusters, division.ranks);
  }
  if (division.sharing == Sharing::ranges)
    return multiply_with<T, Operand, typename Forms::Ranges>(run, division.clusters, 1);
  multiply_with<T, Operand, typename Forms::Units>(run, division.clusters, 1);
}

template <class T, class Operand>
void multiply_all(Run& run) {
  std::optional<Division> best;
  void (*multiply_best)(Run&, const Division&) = nullptr;
  for_every_form([&](auto forms) {
    using Considered = decltype(forms);
    const bool is_considered =
        run.division.empty()
            ? Considered::is_for(run.problem.tokens)
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

}  // namespace

Tensor nvfp4_warpgroup_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                              bool native, double global_scale, const std::optional<Tensor>& column_scale,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                              bool silu_mul, const std::vector<int64_t>& division) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = decode::device_of(x.get_device_index());
  const Tensor out =
      torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), x.scalar_type());
  const decode::Problem checked = decode::problem_of(x, codes, outputs, scales, 1);
  Problem problem{};
  problem.output.column_scale = static_cast<const float*>(data_or_null(column_scale));
  problem.output.bias = data_or_null(bias);
  require(!residual || (residual->numel() == out.numel() && residual->is_contiguous() &&
                        residual->scalar_type() == out.scalar_type()),
          "a residual must have the result's shape and type");
  problem.output.residual = data_or_null(residual);
  problem.output.out = out.mutable_data_ptr();
  problem.output.global_scale = static_cast<float>(global_scale);
  problem.output.outputs = checked.outputs;
  problem.columns = checked.columns;
  problem.chunks = checked.chunks;
  problem.groups = checked.groups;
  problem.tokens = static_cast<uint32_t>(x.numel() / checked.columns);
  problem.output.silu_mul = silu_mul;
  if (problem.tokens == 0) return out;
  require(division.empty() || division.size() == 4,
          "expected a division of tokens, rows, sharing and blocks of a cluster, found ", division.size(),
          " numbers");
  require(native == (x.scalar_type() == ScalarType::Half),
          "expected codes prepared for the activations' type");
  Run run{problem, checked.codes, checked.scales, x, device, division, current_stream(x)};
  if (native) {
    multiply_all<__half, HalfOperand>(run);
  } else {
    multiply_all<__nv_bfloat16, BfloatOperand>(run);
  }
  return out;
}

}  // namespace nibble::warpgroup

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_warpgroup_linear", TORCH_BOX(&nibble::warpgroup::nvfp4_warpgroup_linear));
}
