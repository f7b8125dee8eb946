// The gated delta rule's kernels, their own source, run on the host: test_gated_delta_on_the_host.py.
#include "gated_delta/prompts.cuh"
#include "gated_delta/step.cuh"
#include "run_cluster.h"

using namespace nibble::gated_delta;

namespace {

template <class F>
void run_step(const Problem& p) {
  const uint32_t share = p.value_heads / p.key_heads, ranks = share / F::kHeads;
  const uint32_t clusters = p.tokens * p.key_heads;
  for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
    run_cluster(ranks, F::kThreads, sizeof(Shared<F>), cluster, clusters, [&](uint4* memory) {
      const Place place(p, share, cluster % p.key_heads, blockIdx.x % ranks * F::kHeads);
      Step<F>(p, *reinterpret_cast<Shared<F>*>(memory), cluster / p.key_heads, place).run();
    });
  }
}

template <class State>
void run_prompts(const Prompts& all) {
  using R = Rule<State>;
  const Problem& p = all.p;
  uint32_t blocks = p.live_tokens * Convolution::blocks_of_token(p);
  for (uint32_t block = 0; block < blocks; ++block)
    run_cluster(1, kConvolveThreads, 0, block, blocks, [&](uint4*) { Convolution(all).run(); });
  blocks = all.sequences * p.value_heads * R::kSplits;
  for (uint32_t block = 0; block < blocks; ++block) {
    run_cluster(1, R::kThreads, sizeof(typename R::Shared), block, blocks, [&](uint4* memory) {
      R(all, *reinterpret_cast<typename R::Shared*>(memory)).run();
    });
  }
  blocks = (p.tokens * p.value_heads * kLanes + kNormThreads - 1) / kNormThreads;
  for (uint32_t block = 0; block < blocks; ++block)
    run_cluster(1, kNormThreads, 0, block, blocks, [&](uint4*) { norm_output(p); });
}

}  // namespace

extern "C" uint32_t problem_bytes() { return sizeof(Problem); }
extern "C" uint32_t prompts_bytes() { return sizeof(Prompts); }

extern "C" void step_on_the_host(const Problem* problem, bool is_float, bool is_late,
                                 uint32_t multiprocessors) {
  emulated_is_late = is_late;
  with_form(*problem, is_float, multiprocessors, [&](auto form) { run_step<decltype(form)>(*problem); });
}

extern "C" void prompts_on_the_host(const Prompts* prompts, bool is_float, bool is_late) {
  emulated_is_late = is_late;
  is_float ? run_prompts<Floats>(*prompts) : run_prompts<Bfloats>(*prompts);
}
