// E4M3 experts of the decode kernel, run on the host: test_e4m3_experts_on_the_host.py.
#include "nibble/tensor_core.cuh"
#include "nvfp4_linear/decode.cuh"
#include "nvfp4_moe/decode.cuh"
#include "run_cluster.h"

using namespace nibble::decode;

namespace {

template <class Form>
void run(const Problem& problem, const Experts& experts, uint32_t blocks) {
  const size_t shared = Form::shared_bytes(problem.chunks_per_phase, Form::kTokens, true);
  for (uint32_t block = 0; block < blocks; ++block) {
    Table table;
    run_cluster(1, Form::kThreads, shared, block, blocks, [&](uint4* memory) {
      run_experts<__nv_bfloat16, nibble::E4m3Operand, Form>(problem, experts, table, memory);
    });
  }
}

template <class Forms>
void run_forms(uint32_t tokens, const Problem& problem, const Experts& experts, uint32_t blocks) {
  if (tokens <= 8) return run<typename Forms::Few>(problem, experts, blocks);
  run<typename Forms::Some>(problem, experts, blocks);
}

}  // namespace

// `small`: the forms of SM12x.
extern "C" void multiply_e4m3_experts_on_the_host(bool small, const void* x, const void* codes,
                                                  const void* scales, const void* global_scales,
                                                  const void* row_scales, const void* ids,
                                                  const void* weights, void* out, uint32_t tokens,
                                                  uint32_t pairs, uint32_t inputs, uint32_t count,
                                                  uint32_t outputs, uint32_t columns, uint32_t blocks,
                                                  uint32_t phases, bool silu_mul) {
  Problem problem{};
  problem.x = static_cast<const uint4*>(x);
  problem.codes = static_cast<const uint4*>(codes);
  problem.scales = static_cast<const uint32_t*>(scales);
  problem.out = out;
  problem.outputs = outputs;
  problem.columns = columns;
  problem.chunks = (columns + kChunk - 1) / kChunk;
  problem.groups = (outputs / 2 + kGroup - 1) / kGroup;
  problem.ranks = 1;
  problem.chunks_per_phase = (problem.chunks + phases - 1) / phases;
  problem.silu_mul = silu_mul;
  const Experts experts{static_cast<const int32_t*>(ids),
                        static_cast<const float*>(weights),
                        static_cast<const float*>(global_scales),
                        static_cast<const float*>(row_scales),
                        pairs,
                        count,
                        pairs / inputs};
  if (small) return run_forms<SmallE4m3Forms>(tokens, problem, experts, blocks);
  run_forms<LargeE4m3Forms>(tokens, problem, experts, blocks);
}
