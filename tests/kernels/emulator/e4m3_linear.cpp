// The decode kernel with an E4M3 weight in rows, run on the host: test_e4m3_linear_on_the_host.py.
#include "nibble/tensor_core.cuh"
#include "nvfp4_linear/decode.cuh"
#include "run_cluster.h"

using namespace nibble::decode;

namespace {

template <class Form>
void run(const Problem& problem, uint32_t clusters) {
  const size_t shared = Form::shared_bytes(problem.chunks_per_phase, Form::kTokens, true);
  for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
    const Share share = share_of(problem.groups, cluster, clusters, problem.groups / clusters);
    run_cluster(problem.ranks, Form::kThreads, shared, cluster, clusters, [&](uint4* memory) {
      Multiplier<__nv_bfloat16, nibble::E4m3Operand, Form>(problem, share, memory).run();
    });
  }
}

template <class Forms>
void run_forms(const Problem& problem, uint32_t clusters) {
  if (problem.tokens <= 8) return run<typename Forms::Few>(problem, clusters);
  if (problem.tokens <= 16) return run<typename Forms::Some>(problem, clusters);
  run<typename Forms::Many>(problem, clusters);
}

}  // namespace

// `small`: the forms of SM12x.
extern "C" void multiply_e4m3_rows_on_the_host(bool small, const void* x, const void* weight,
                                               const void* scales, const void* column_scale, const void* bias,
                                               const void* residual, void* out,
                                               uint32_t tokens, uint32_t outputs, uint32_t columns,
                                               uint32_t clusters, uint32_t ranks, uint32_t phases,
                                               bool silu_mul) {
  Problem problem{};
  problem.x = static_cast<const uint4*>(x);
  problem.codes = static_cast<const uint4*>(weight);
  problem.scales = static_cast<const uint32_t*>(scales);
  problem.column_scale = static_cast<const float*>(column_scale);
  problem.bias = bias;
  problem.residual = residual;
  problem.out = out;
  problem.upper_global_scale = problem.lower_global_scale = 1.0f;
  problem.tokens = tokens;
  problem.outputs = outputs;
  problem.columns = columns;
  problem.chunks = (columns + kChunk - 1) / kChunk;
  problem.groups = (outputs / 2 + kGroup - 1) / kGroup;
  problem.ranks = ranks;
  const uint32_t chunks = (problem.chunks + ranks - 1) / ranks;  // of a rank
  problem.chunks_per_phase = (chunks + phases - 1) / phases;
  problem.silu_mul = silu_mul;
  if (small) return run_forms<SmallE4m3RowsForms>(problem, clusters);
  run_forms<LargeE4m3RowsForms>(problem, clusters);
}
