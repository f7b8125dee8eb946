// nibble::nvfp4_warpgroup_linear: x in the order of warpgroup.cuh, how the work is divided, and the launches.
#include <map>
#include <mutex>

#include "nibble/decode_launch.h"
#include "nvfp4_linear/prompt.cuh"
#include "nvfp4_linear/warpgroup.cuh"

namespace nibble::warpgroup {
namespace {

using decode::Device;
using decode::Launch;
using decode::quotient_up;

constexpr uint32_t kOrderWarps = 4;

// x [tokens, columns] as [tiles, chunks, steps, 2, Tokens] pieces of 16 bytes, zeros past the last token and
// column. A warp has 8 tokens of a chunk.
template <uint32_t Tokens>
__global__ void __launch_bounds__(kOrderWarps* kLanes)
    order_x(const uint4* x, uint4* to, uint32_t tokens, uint32_t columns, uint32_t chunks, uint32_t* flags,
            uint32_t flag_count) {
  instruction::let_next_kernel_start();
  instruction::wait_for_previous_kernel();
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < flag_count; i += gridDim.x * blockDim.x) flags[i] = 0;
  const uint32_t unit = blockIdx.x * kOrderWarps + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t token_group = unit / chunks, chunk = unit - token_group * chunks;
  const uint32_t token = token_group * kTokenGroup + lane % kTokenGroup, piece = lane / kTokenGroup;
  const uint32_t tile = token / Tokens;
  if (tile * Tokens >= tokens) return;
  uint4 quarters[4];
  load_quarters(x, token, tokens, chunk, columns, piece, quarters);
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

template <class T, class Operand>
__global__ void __launch_bounds__(PromptForm::kThreads, 1)
    multiply_prompt(const __grid_constant__ PromptProblem problem) {
#if NIBBLE_HAS_WARPGROUP_PRODUCTS
  extern __shared__ __align__(1024) uint8_t prompt_shared[];
  PromptMultiplier<T, Operand>{problem, instruction::shared_place(prompt_shared)}.run();
#endif
}

// As in decode.cu: clusters that the device runs at a time.
template <class T, class Operand, class Form>
uint32_t clusters_at_a_time(uint32_t ranks, const Device& device) {
  if (ranks == 1) return device.multiprocessors;
  static std::mutex mutex;
  static std::map<std::pair<int, uint32_t>, uint32_t> known;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = known.try_emplace({device.index, ranks});
  if (is_new) {
    const auto kernel = multiply<T, Operand, Form>;
    const uint32_t bytes = Form::shared_bytes(ranks);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    const Launch launch(device.multiprocessors / ranks * ranks, ranks, Form::kThreads, bytes, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) cudaGetLastError();
    place->second = static_cast<uint32_t>(clusters);
  }
  return place->second;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, by way of the runtime: nothing here links the driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
    require(result == cudaDriverEntryPointSuccess, "the NVIDIA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return found;
}

// Boxes of `box_rows` rows of `words` words, from a matrix whose rows are `chunks` times as long.
CUtensorMap map_of(const void* data, uint32_t words, uint32_t chunks, uint32_t rows, uint32_t box_rows) {
  CUtensorMap map{};
  const cuuint64_t sizes[] = {uint64_t{words} * chunks, rows}, bytes[] = {uint64_t{words} * chunks * 4};
  const cuuint32_t box[] = {words, box_rows}, steps[] = {1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<void*>(data), sizes, bytes, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result));
  return map;
}

// Boxes of 64 columns, 128 bytes, by the prompt kernel's tokens, swizzled.
CUtensorMap map_of_x(const void* data, uint32_t tokens, uint32_t columns) {
  CUtensorMap map{};
  const cuuint64_t sizes[] = {columns, tokens}, bytes[] = {uint64_t{columns} * 2};
  const cuuint32_t box[] = {kChunk / 2, PromptForm::kTokens / PromptForm::kRanks}, steps[] = {1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, bytes, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: ", static_cast<int>(result));
  return map;
}

struct Run {
  Problem problem;
  const void *codes, *scales;
  const Tensor& x;
  const Device& device;
  uint32_t ranks;  // of a cluster, or 0
  cudaStream_t stream;
};

template <class T, class Operand, class Form>
void multiply_with(Run& run, uint32_t clusters) {
  Problem& p = run.problem;
  p.codes = map_of(run.codes, kCodeBytes / 4, p.chunks, p.groups, Form::kGroups);
  p.scales = map_of(run.scales, kScaleBytes / 4, p.chunks, p.groups, Form::kGroups);
  std::optional<Tensor> work;
  if (Form::kOrders) {
    p.x = static_cast<const uint4*>(run.x.const_data_ptr());
  } else {
    const int64_t x_bytes = int64_t{p.token_tiles} * p.chunks * Form::kXBytes;
    const int64_t part_bytes = Form::kRanges ? int64_t{clusters} * Form::kSlots * Form::kSlotBytes : 0;
    const uint32_t flag_count = Form::kRanges ? clusters * Form::kConsumerWarps : 0;
    work = torch::stable::new_empty(run.x, {(x_bytes + part_bytes + flag_count * 4) / 2}, run.x.scalar_type());
    uint8_t* const at = static_cast<uint8_t*>(work->mutable_data_ptr());
    p.x = reinterpret_cast<const uint4*>(at);
    p.parts = reinterpret_cast<float4*>(at + x_bytes);
    p.flags = reinterpret_cast<uint32_t*>(at + x_bytes + part_bytes);
    const uint32_t order_units = p.token_tiles * (Form::kTokens / kTokenGroup) * p.chunks;
    Launch order(quotient_up(order_units, kOrderWarps), 1, kOrderWarps * kLanes, 0, run.stream);
    order(order_x<Form::kTokens>, static_cast<const uint4*>(run.x.const_data_ptr()), reinterpret_cast<uint4*>(at),
          p.tokens, p.columns, p.chunks, p.flags, flag_count);
  }
  Launch launch(clusters * p.ranks, p.ranks, Form::kThreads, Form::shared_bytes(p.ranks), run.stream);
  launch(multiply<T, Operand, Form>, p);
}

template <class T, class Operand>
void multiply_prompt_with(Run& run) {
  using Form = PromptForm;
  const Problem& p = run.problem;
  PromptProblem prompt{};
  prompt.codes = map_of(run.codes, kCodeBytes / 4, p.chunks, p.groups, Form::kGroups);
  prompt.scales = map_of(run.scales, kScaleBytes / 4, p.chunks, p.groups, Form::kGroups);
  prompt.x = map_of_x(run.x.const_data_ptr(), p.tokens, p.columns);
  prompt.output = p.output;
  prompt.tokens = p.tokens;
  prompt.chunks = p.chunks;
  prompt.groups = p.groups;
  prompt.row_blocks = quotient_up(p.groups, Form::kGroups * Form::kRanks);
  prompt.token_tiles = quotient_up(p.tokens, Form::kTokens);
  const uint32_t clusters =
      std::min(prompt.row_blocks * prompt.token_tiles, run.device.multiprocessors / Form::kRanks);
  Launch launch(clusters * Form::kRanks, Form::kRanks, Form::kThreads, Form::kSharedBytes, run.stream);
  launch(multiply_prompt<T, Operand>, prompt);
}

// A form for each way to share the work.
template <uint32_t Tokens, uint32_t Warpgroups, uint32_t Strips, uint32_t Stages, uint32_t Pieces = 1>
struct Forms {
  using Units = Form<Tokens, Warpgroups, Strips, Stages, Sharing::units, false, Pieces>;
  using Clusters = Form<Tokens, Warpgroups, Strips, Stages, Sharing::clusters, false, Pieces>;
  using Ranges = Form<Tokens, Warpgroups, Strips, Stages, Sharing::ranges, false, Pieces>;
};

template <class T, class Operand, class Forms>
void multiply_all(Run& run) {
  using Units = typename Forms::Units;
  using Clusters = typename Forms::Clusters;
  using Ranges = typename Forms::Ranges;
  Problem& p = run.problem;
  p.row_blocks = quotient_up(p.groups, Units::kGroups);
  p.token_tiles = quotient_up(p.tokens, Units::kTokens);
  p.ranks = 1;
  const uint32_t units = p.row_blocks * p.token_tiles, all = units * p.chunks;
  const uint32_t blocks = std::min(run.device.multiprocessors, all);
  if (run.ranks == 100) return multiply_with<T, Operand, Ranges>(run, blocks);
  if (run.ranks == 1) return multiply_with<T, Operand, Units>(run, std::min(units, blocks));
  // Stages until the last block is through.
  float best = static_cast<float>(quotient_up(units, blocks) * p.chunks);
  uint32_t clusters = 0;
  if constexpr (Clusters::shared_bytes(2) <= 227 * 1024) {
    for (uint32_t ranks = 2; ranks <= 8 && ranks <= p.chunks; ++ranks) {
      if (run.ranks != 0 && ranks != run.ranks) continue;
      if (Clusters::shared_bytes(ranks) > run.device.shared_bytes) continue;
      const uint32_t at_a_time = clusters_at_a_time<T, Operand, Clusters>(ranks, run.device);
      if (at_a_time == 0) continue;
      const float cost = static_cast<float>(quotient_up(units, at_a_time) * (quotient_up(p.chunks, ranks) + 1));
      if (cost < best || run.ranks != 0) {
        best = cost;
        clusters = std::min(at_a_time, units);
        p.ranks = ranks;
      }
    }
  }
  const float of_ranges = static_cast<float>(quotient_up(all, blocks)) + 4.0f * quotient_up(blocks, units);
  if (run.ranks == 0 && of_ranges < best) {
    p.ranks = 1;
    return multiply_with<T, Operand, Ranges>(run, blocks);
  }
  if constexpr (Clusters::shared_bytes(2) <= 227 * 1024) {
    if (clusters != 0) return multiply_with<T, Operand, Clusters>(run, clusters);
  }
  multiply_with<T, Operand, Units>(run, std::min(units, blocks));
}

const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// `form`: tokens of a tile, or 0; `ranks` of a cluster, or 0: for measurements.
Tensor nvfp4_warpgroup_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                              bool native, double global_scale, const std::optional<Tensor>& column_scale,
                              const std::optional<Tensor>& bias, bool silu_mul,
                              const std::vector<int64_t>& division) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = decode::device_of(x.get_device_index());
  const Tensor out =
      torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), x.scalar_type());
  const decode::Problem checked = decode::problem_of(x, codes, outputs, scales, 1);
  Problem problem{};
  problem.output.column_scale = static_cast<const float*>(data_or_null(column_scale));
  problem.output.bias = data_or_null(bias);
  problem.output.out = out.mutable_data_ptr();
  problem.output.global_scale = static_cast<float>(global_scale);
  problem.output.outputs = checked.outputs;
  problem.columns = checked.columns;
  problem.chunks = checked.chunks;
  problem.groups = checked.groups;
  problem.tokens = static_cast<uint32_t>(x.numel() / checked.columns);
  problem.output.silu_mul = silu_mul;
  if (problem.tokens == 0) return out;
  Run run{problem, checked.codes, checked.scales, x, device,
          division.empty() ? 0u : static_cast<uint32_t>(division[1]), current_stream(x)};
  const uint32_t tokens = division.empty() || division[0] == 0 ? problem.tokens : static_cast<uint32_t>(division[0]);
  require(native == (x.scalar_type() == ScalarType::Half), "expected codes prepared for the activations' type");
  const auto run_as = [&](auto type, auto operand) {
    using T = typename decltype(type)::type;
    using Operand = typename decltype(operand)::type;
    const int64_t variant = division.size() > 2 ? division[2] : 1;
    if (variant == 2) {
      if (tokens <= 16) return multiply_all<T, Operand, Forms<16, 2, 2, 8>>(run);
      if (tokens <= 32) return multiply_all<T, Operand, Forms<32, 2, 2, 6>>(run);
      if (tokens <= 64) return multiply_all<T, Operand, Forms<64, 2, 2, 4>>(run);
    }
    if (variant == 3) {
      return multiply_all<T, Operand, Forms<96, 4, 1, 5>>(run);
    }
    if (tokens <= 16) return multiply_all<T, Operand, Forms<16, 4, 1, 8>>(run);
    if (tokens <= 32) return multiply_all<T, Operand, Forms<32, 4, 1, 6>>(run);
    if (tokens <= 64) return multiply_all<T, Operand, Forms<64, 4, 1, 4>>(run);
    if (tokens <= 128) return multiply_all<T, Operand, Forms<128, 2, 1, 3>>(run);
    if (tokens <= 4096) return multiply_all<T, Operand, Forms<128, 2, 2, 4>>(run);
    multiply_prompt_with<T, Operand>(run);
  };
#ifndef DEV
  if (native) {
    run_as(TypeOf<__half>(), TypeOf<HalfOperand>());
    return out;
  }
#endif
  run_as(TypeOf<__nv_bfloat16>(), TypeOf<BfloatOperand>());
  return out;
}

}  // namespace
}  // namespace nibble::warpgroup

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_warpgroup_linear", TORCH_BOX(&nibble::warpgroup::nvfp4_warpgroup_linear));
}
