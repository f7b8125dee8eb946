// The decode kernels' own sources, run on the host: test_decode_kernel_on_the_host.py.
#include <thread>
#include <utility>

#include "nibble/tensor_core.cuh"
#include "nvfp4_linear/decode.cuh"
#include "nvfp4_moe/decode.cuh"

using namespace nibble::decode;

namespace {

// Calls f(shared memory) in each thread of one block.
template <class Form, class F>
void run_block(uint32_t block, uint32_t blocks, uint32_t chunks, F&& f) {
  EmulatedBlock shared(Form::kThreads, Form::kTeamThreads);
  // NaN, so that what was not written would show.
  std::vector<uint4> memory(Form::shared_bytes(chunks) / sizeof(uint4) + 1, make_uint4(~0u, ~0u, ~0u, ~0u));
  std::vector<std::jthread> threads;
  for (uint32_t thread = 0; thread < Form::kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      threadIdx = {thread};
      blockIdx = {block};
      blockDim = {Form::kThreads};
      gridDim = {blocks};
      emulated_block = &shared;
      f(memory.data());
    });
  }
}

template <class T, class Operand, class Form>
void run(Problem problem, uint32_t blocks) {
  std::vector<float> partials(size_t{problem.groups} * problem.splits * Form::kSums, NAN);
  problem.partials = partials.data();
  for (uint32_t block = blocks; block-- > 0;) {
    const Share share{block % problem.splits, block / problem.splits, blocks / problem.splits};
    run_block<Form>(block, blocks, problem.chunks_per_split,
                    [&](uint4* memory) { Multiplier<T, Operand, Form>(problem, share, memory).run(); });
  }
}

template <class T, class Operand>
void run_form(const Problem& problem, uint32_t blocks) {
  if (problem.tokens <= 8) return run<T, Operand, Few>(problem, blocks);
  if (problem.tokens <= 16) return run<T, Operand, Some>(problem, blocks);
  if (problem.tokens <= 32) return run<T, Operand, Many>(problem, blocks);
  run<T, Operand, Most>(problem, blocks);
}

template <class Form>
void run_experts_form(const Problem& problem, const Experts& experts, uint32_t blocks) {
  for (uint32_t block = 0; block < blocks; ++block) {
    Table table;
    run_block<Form>(block, blocks, problem.chunks, [&](uint4* memory) {
      run_experts<__nv_bfloat16, nibble::BfloatOperand, Form>(problem, experts, table, memory);
    });
  }
}

Problem problem_of(const void* x, const void* codes, const void* scales, void* out, uint32_t outputs,
                   uint32_t columns, bool silu_mul) {
  Problem problem{};
  problem.x = static_cast<const uint4*>(x);
  problem.codes = static_cast<const uint8_t*>(codes);
  problem.scales = static_cast<const uint32_t*>(scales);
  problem.out = out;
  problem.outputs = outputs;
  problem.columns = columns;
  problem.chunks = (columns + kChunk - 1) / kChunk;
  problem.groups = (outputs / 2 + kGroup - 1) / kGroup;
  problem.splits = 1;
  problem.chunks_per_split = problem.chunks;
  problem.silu_mul = silu_mul;
  return problem;
}

}  // namespace

extern "C" void multiply_experts_on_the_host(const void* x, const void* codes, const void* scales,
                                             const void* global_scales, const void* ids, const void* weights,
                                             void* out, uint32_t tokens, uint32_t pairs,
                                             uint32_t pairs_per_input, uint32_t count, uint32_t outputs,
                                             uint32_t columns, uint32_t blocks, bool silu_mul) {
  const Problem problem = problem_of(x, codes, scales, out, outputs, columns, silu_mul);
  const Experts experts{static_cast<const int32_t*>(ids),
                        static_cast<const float*>(weights),
                        static_cast<const float*>(global_scales),
                        pairs,
                        count,
                        pairs_per_input};
  if (tokens <= 8) return run_experts_form<FewOfAnExpert>(problem, experts, blocks);
  run_experts_form<SomeOfAnExpert>(problem, experts, blocks);
}

extern "C" void multiply_on_the_host(bool bfloat, bool bfloat_operands, const void* x, const void* codes,
                                     const void* scales, const void* column_scale, const void* bias,
                                     const void* residual, void* out, void* arrivals, float global_scale,
                                     uint32_t tokens, uint32_t outputs, uint32_t columns, uint32_t splits,
                                     uint32_t blocks_per_split, bool silu_mul) {
  Problem problem = problem_of(x, codes, scales, out, outputs, columns, silu_mul);
  problem.column_scale = static_cast<const float*>(column_scale);
  problem.bias = bias;
  problem.residual = residual;
  problem.arrivals = static_cast<uint32_t*>(arrivals);
  problem.upper_global_scale = problem.lower_global_scale = global_scale;
  problem.tokens = tokens;
  problem.splits = splits;
  problem.chunks_per_split = (problem.chunks + splits - 1) / splits;
  const uint32_t blocks = splits * blocks_per_split;
  if (!bfloat) return run_form<__half, nibble::HalfOperand>(problem, blocks);
  if (bfloat_operands) return run_form<__nv_bfloat16, nibble::BfloatOperand>(problem, blocks);
  run_form<__nv_bfloat16, nibble::HalfOperand>(problem, blocks);
}
