// The kernel before attention, its own source, run on the host: test_attention_front_on_the_host.py.
#include "attention_front/front.cuh"
#include "run_cluster.h"

using namespace nibble::front;

namespace {

template <uint32_t HeadDim, bool IsFp8>
void run(const Problem& problem) {
  using Kernel = Front<HeadDim, IsFp8>;
  const uint32_t rows = problem.tokens * (problem.heads + 2 * problem.kv_heads);
  const uint32_t blocks = (rows * Kernel::kLanesOfHead + kThreads - 1) / kThreads;
  for (uint32_t block = 0; block < blocks; ++block)
    run_cluster(1, kThreads, 0, block, blocks, [&](uint4*) { Kernel(problem).run(); });
}

template <bool IsFp8>
void run_size(const Problem& problem, uint32_t head_dim) {
  if (head_dim == 64) return run<64, IsFp8>(problem);
  if (head_dim == 128) return run<128, IsFp8>(problem);
  run<256, IsFp8>(problem);
}

}  // namespace

extern "C" uint32_t problem_bytes() { return sizeof(Problem); }

extern "C" void prepare_on_the_host(const Problem* problem, uint32_t head_dim, bool is_fp8, bool is_late) {
  emulated_is_late = is_late;
  if (is_fp8) {
    run_size<true>(*problem, head_dim);
  } else {
    run_size<false>(*problem, head_dim);
  }
}
