// The decode kernels' own sources, run on the host: test_decode_kernel_on_the_host.py.
#include <type_traits>
#include <utility>

#include "nibble/tensor_core.cuh"
#include "nvfp4_linear/decode.cuh"
#include "nvfp4_moe/decode.cuh"
#include "run_cluster.h"

using namespace nibble::decode;

namespace {

// As on SM12x and as on SM90.
using Forms = std::conditional_t<NIBBLE_HAS_E2M1_INSTRUCTIONS, SmallForms, LargeForms>;

template <class Form>
size_t shared_bytes(const Problem& problem) {
  return Form::shared_bytes(problem.chunks_per_phase, Form::kTokens, true);
}

template <class T, class Operand, class Form>
void run(const Problem& problem, uint32_t clusters) {
  for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
    const Share share = share_of(problem.groups, cluster, clusters, problem.groups / clusters);
    run_cluster(problem.ranks, Form::kThreads, shared_bytes<Form>(problem), cluster, clusters,
                [&](uint4* memory) { Multiplier<T, Operand, Form>(problem, share, memory).run(); });
  }
}

template <class T, class Operand>
void run_form(const Problem& problem, uint32_t clusters) {
  if (problem.norm_after.scaled)
    return run<T, Operand, Forms::Few::With<nibble::Norm::after>>(problem, clusters);
  if (problem.norm_before.squares)
    return run<T, Operand, Forms::Few::With<nibble::Norm::before>>(problem, clusters);
  if (problem.tokens <= 8) return run<T, Operand, Forms::Few>(problem, clusters);
  if (problem.tokens <= 16) return run<T, Operand, Forms::Some>(problem, clusters);
  run<T, Operand, Forms::Many>(problem, clusters);
}

template <class Form>
void run_experts_form(const Problem& problem, const Experts& experts, uint32_t blocks) {
  for (uint32_t block = 0; block < blocks; ++block) {
    Table table;
    run_cluster(1, Form::kThreads, shared_bytes<Form>(problem), block, blocks, [&](uint4* memory) {
      run_experts<__nv_bfloat16, nibble::BfloatOperand, Form>(problem, experts, table, memory);
    });
  }
}

Problem problem_of(const void* x, const void* codes, const void* scales, void* out, uint32_t outputs,
                   uint32_t columns, uint32_t ranks, uint32_t phases, bool silu_mul) {
  Problem problem{};
  problem.x = static_cast<const uint4*>(x);
  problem.codes = static_cast<const uint4*>(codes);
  problem.scales = static_cast<const uint32_t*>(scales);
  problem.out = out;
  problem.outputs = outputs;
  problem.columns = columns;
  problem.chunks = (columns + kChunk - 1) / kChunk;
  problem.groups = (outputs / 2 + kGroup - 1) / kGroup;
  problem.ranks = ranks;
  const uint32_t chunks = (problem.chunks + ranks - 1) / ranks;  // of a rank
  problem.chunks_per_phase = (chunks + phases - 1) / phases;
  problem.silu_mul = silu_mul;
  return problem;
}

}  // namespace

extern "C" void multiply_experts_on_the_host(const void* x, const void* codes, const void* scales,
                                             const void* global_scales, const void* ids, const void* weights,
                                             void* out, uint32_t tokens, uint32_t pairs,
                                             uint32_t pairs_per_input, uint32_t count, uint32_t outputs,
                                             uint32_t columns, uint32_t blocks, bool silu_mul) {
  const Problem problem = problem_of(x, codes, scales, out, outputs, columns, 1, 1, silu_mul);
  const Experts experts{static_cast<const int32_t*>(ids),
                        static_cast<const float*>(weights),
                        static_cast<const float*>(global_scales),
                        nullptr,
                        pairs,
                        count,
                        pairs_per_input};
  if (tokens <= 8) return run_experts_form<Forms::Few>(problem, experts, blocks);
  run_experts_form<Forms::Some>(problem, experts, blocks);
}

extern "C" void multiply_on_the_host(bool bfloat, bool bfloat_operands, const void* x, const void* codes,
                                     const void* scales, const void* column_scale, const void* bias,
                                     const void* residual, void* out, float global_scale, uint32_t tokens,
                                     uint32_t outputs, uint32_t columns, uint32_t clusters, uint32_t ranks,
                                     uint32_t phases, bool silu_mul, const void* norm_weight, void* scaled,
                                     void* squares_after, uint32_t tile, const void* squares_before, uint32_t parts,
                                     float epsilon) {
  Problem problem = problem_of(x, codes, scales, out, outputs, columns, ranks, phases, silu_mul);
  problem.norm_after = {norm_weight, scaled, static_cast<float*>(squares_after), tile};
  problem.norm_before = {static_cast<const float*>(squares_before), parts, epsilon, tile};
  problem.column_scale = static_cast<const float*>(column_scale);
  problem.bias = bias;
  problem.residual = residual;
  problem.upper_global_scale = problem.lower_global_scale = global_scale;
  problem.tokens = tokens;
  if (!bfloat) return run_form<__half, nibble::HalfOperand>(problem, clusters);
  if (bfloat_operands) return run_form<__nv_bfloat16, nibble::BfloatOperand>(problem, clusters);
  run_form<__nv_bfloat16, nibble::HalfOperand>(problem, clusters);
}
