// How the work of decode.cuh is divided for a linear layer, and its launch.
#pragma once

#include <vector>

#include "nibble/decode_launch.h"

namespace nibble::decode {

template <class T, class Operand, class Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    multiply(const __grid_constant__ Problem problem) {
  if constexpr (kIsLaunched<Form>) {
    extern __shared__ uint4 shared[];
    const uint32_t clusters = gridDim.x / problem.ranks;
    const Share share =
        share_of(problem.groups, blockIdx.x / problem.ranks, clusters, problem.groups_per_cluster);
    Multiplier<T, Operand, Form>(problem, share, shared).run();
  }
}

struct Run {
  Problem problem;
  const Device& device;
  const std::vector<int64_t>& division;  // ranks of a cluster and phases, or empty
  cudaStream_t stream;
};

struct Division {
  uint32_t ranks, clusters, chunks_per_phase;
};

// Nanoseconds until the last multiprocessor is through: what it reads of the weight and of x, and what rounds
// cost. Fitted to every division's time for 40 products on an H200 (benchmarks/results/
// nvfp4_linear_divisions_h200.json): what it chooses takes 0.2 % longer than the best. Only proportions
// matter.
template <class Form>
float cost(const Problem& p, const Division& division, uint32_t tokens) {
  constexpr uint32_t kBytes = Form::Format::kCodes * 16 + Form::Format::kScales * 4;  // of a tile
  constexpr float kWeightBytes = 42, kXBytes = 23.2f;                     // a nanosecond
  constexpr float kClusterRound = 3400, kBlockRound = 65, kPhase = 2000;  // nanoseconds
  const uint32_t groups = quotient_up(p.groups, division.clusters),
                 chunks = quotient_up(p.chunks, division.ranks);
  const uint32_t batches = quotient_up(groups, Form::kGroupsPerRound),
                 phases = quotient_up(chunks, division.chunks_per_phase);
  const float x = static_cast<float>(chunks * kChunk * 2 * tokens) / kXBytes;
  return static_cast<float>(groups * chunks * kBytes) / kWeightBytes + x * (phases > 1 ? batches : 1) +
         batches * (division.ranks > 1 ? kClusterRound : kBlockRound) + (phases - 1) * batches * kPhase;
}

// `tokens`: as many as x is given room for. The division decides the order of additions and must not depend
// on the batch.
template <class T, class Operand, class Form>
Division division_of(const Run& run, uint32_t tokens) {
  const Problem& p = run.problem;
  std::optional<Division> best;
  for (uint32_t ranks = 1; ranks <= 4; ranks *= 2) {
    if (!run.division.empty() && ranks != run.division[0]) continue;
    const uint32_t clusters = clusters_at_a_time<multiply<T, Operand, Form>>(
        ranks, Form::kThreads, run.device.shared_bytes, run.device);
    if (clusters == 0 || ranks > p.chunks) continue;
    const uint32_t chunks = quotient_up(p.chunks, ranks);
    Division division{ranks, std::min(clusters, p.groups),
                      chunks_per_phase<Form>(chunks, tokens, run.device)};
    if (!run.division.empty())
      division.chunks_per_phase =
          std::min(division.chunks_per_phase, quotient_up(chunks, static_cast<uint32_t>(run.division[1])));
    if (!best || cost<Form>(p, division, tokens) < cost<Form>(p, *best, tokens)) best = division;
  }
  require(best.has_value(), "no such division of ", p.chunks, " chunks here");
  return *best;
}

template <class T, class Operand, class Form>
void multiply_some(Run& run, uint32_t tokens) {
  Problem& p = run.problem;
  const Division division = division_of<T, Operand, Form>(run, tokens);
  p.ranks = division.ranks;
  p.chunks_per_phase = division.chunks_per_phase;
  p.groups_per_cluster = p.groups / division.clusters;
  const bool totals = p.ranks > 1 || p.chunks_per_phase < p.chunks;
  uint32_t bytes = Form::shared_bytes(p.chunks_per_phase, p.tokens, totals);
  // Two blocks on one multiprocessor would leave another idle: of a cluster, or of the kernel that follows, which
  // may begin while this one ends.
  bytes = std::max(bytes, run.device.shared_bytes / 2 + 1024);
  Launch launch(division.clusters * p.ranks, p.ranks, Form::kThreads, bytes, run.stream);
  launch(multiply<T, Operand, Form>, p);
}

template <class T, class Operand, class Forms>
void multiply_all(Run& run, bool batch_invariant) {
  Problem& p = run.problem;
  const uint32_t all = p.tokens;
  const size_t x_row = p.columns * sizeof(T),
               out_row = size_t{p.silu_mul ? p.outputs / 2 : p.outputs} * sizeof(T);
  for (uint32_t done = 0; done < all; done += p.tokens) {
    const uint32_t left = all - done;
    const auto launch_for = [&](auto form, uint32_t capacity) {
      p.tokens = std::min(left, capacity);
      multiply_some<T, Operand, typename decltype(form)::type>(run, capacity);
    };
    if (batch_invariant || (left > 8 && left <= 16)) {
      launch_for(TypeOf<typename Forms::Some>(), 16);
    } else if (left > 16) {
      launch_for(TypeOf<typename Forms::Many>(), 32);
    } else {
      launch_for(TypeOf<typename Forms::Few>(), left > 4 ? 8 : 4);
    }
    p.x += p.tokens * x_row / sizeof(uint4);
    p.out = static_cast<char*>(p.out) + p.tokens * out_row;
    if (p.residual) p.residual = static_cast<const char*>(p.residual) + p.tokens * out_row;
  }
}

inline const void* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// What comes after the sums.
struct Epilogue {
  double global_scale;
  const std::optional<Tensor>&column_scale, &bias, &residual;
  bool silu_mul;
};

template <class Format>
Problem linear_problem(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t outputs,
                       const Epilogue& epilogue, const Tensor& out) {
  const std::optional<Tensor>& residual = epilogue.residual;
  Problem problem = problem_of<Format>(x, codes, outputs, scales, 1);
  problem.column_scale = static_cast<const float*>(data_or_null(epilogue.column_scale));
  problem.bias = data_or_null(epilogue.bias);
  require(!residual || (residual->numel() == out.numel() && residual->is_contiguous() &&
                        residual->scalar_type() == out.scalar_type()),
          "a residual must have the result's shape and type");
  problem.residual = data_or_null(residual);
  problem.out = out.mutable_data_ptr();
  problem.upper_global_scale = problem.lower_global_scale = static_cast<float>(epilogue.global_scale);
  problem.tokens = static_cast<uint32_t>(x.numel() / problem.columns);
  problem.silu_mul = epilogue.silu_mul;
  return problem;
}

// x times a weight of `outputs` rows; launch(run) for its format.
template <class Format, class F>
Tensor multiply_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                       const Epilogue& epilogue, const std::vector<int64_t>& division, F&& launch) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = device_of(x.get_device_index());
  const Tensor out = torch::stable::new_empty(x, with_last(x, epilogue.silu_mul ? outputs / 2 : outputs),
                                              x.scalar_type());
  Run run{linear_problem<Format>(x, codes, scales, outputs, epilogue, out), device, division, current_stream(x)};
  launch(run);
  return out;
}

}  // namespace nibble::decode
