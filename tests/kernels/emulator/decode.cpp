// The decode kernel's own source, run on the host: test_decode_kernel_on_the_host.py.
#include <thread>
#include <utility>

#include "nibble/tensor_core.cuh"
#include "nvfp4_linear/decode.cuh"

using namespace nibble::decode;

namespace {

template <class T, class Operand, class Form>
void run_block(const Problem& problem, uint32_t block, uint32_t blocks) {
  EmulatedBlock shared(Form::kThreads, Form::kTeamThreads);
  // NaN, so that what was not written would show.
  std::vector<uint4> memory(Form::shared_bytes(problem.chunks_per_split) / sizeof(uint4) + 1,
                            make_uint4(~0u, ~0u, ~0u, ~0u));
  std::vector<std::jthread> threads;
  for (uint32_t thread = 0; thread < Form::kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      threadIdx = {thread};
      blockIdx = {block};
      gridDim = {blocks};
      emulated_block = &shared;
      Multiplier<T, Operand, Form>(problem, memory.data()).run();
    });
  }
}

template <class T, class Operand, class Form>
void run(Problem problem, uint32_t blocks) {
  std::vector<float> partials(size_t{problem.groups} * problem.splits * Form::kSums, NAN);
  problem.partials = partials.data();
  for (uint32_t block = blocks; block-- > 0;) run_block<T, Operand, Form>(problem, block, blocks);
}

template <class T, class Operand>
void run_form(const Problem& problem, uint32_t blocks) {
  if (problem.tokens <= 8) return run<T, Operand, Few>(problem, blocks);
  if (problem.tokens <= 16) return run<T, Operand, Some>(problem, blocks);
  if (problem.tokens <= 32) return run<T, Operand, Many>(problem, blocks);
  run<T, Operand, Most>(problem, blocks);
}

}  // namespace

extern "C" void multiply_on_the_host(bool bfloat, bool bfloat_operands, const void* x, const void* codes,
                                     const void* scales, const void* column_scale, const void* bias,
                                     const void* residual, void* out, void* arrivals, float global_scale,
                                     uint32_t tokens, uint32_t outputs, uint32_t columns, uint32_t splits,
                                     uint32_t blocks_per_split, bool silu_mul) {
  Problem problem{};
  problem.x = static_cast<const uint4*>(x);
  problem.codes = static_cast<const uint8_t*>(codes);
  problem.scales = static_cast<const uint32_t*>(scales);
  problem.column_scale = static_cast<const float*>(column_scale);
  problem.bias = bias;
  problem.residual = residual;
  problem.out = out;
  problem.arrivals = static_cast<uint32_t*>(arrivals);
  problem.global_scale = global_scale;
  problem.tokens = tokens;
  problem.outputs = outputs;
  problem.columns = columns;
  problem.chunks = (columns + kChunk - 1) / kChunk;
  problem.groups = (outputs / 2 + kGroup - 1) / kGroup;
  problem.splits = splits;
  problem.chunks_per_split = (problem.chunks + splits - 1) / splits;
  problem.silu_mul = silu_mul;
  const uint32_t blocks = splits * blocks_per_split;
  if (!bfloat) return run_form<__half, nibble::HalfOperand>(problem, blocks);
  if (bfloat_operands) return run_form<__nv_bfloat16, nibble::BfloatOperand>(problem, blocks);
  run_form<__nv_bfloat16, nibble::HalfOperand>(problem, blocks);
}
