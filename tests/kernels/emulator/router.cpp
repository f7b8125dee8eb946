// The router's own source, run on the host: test_router_on_the_host.py.
#include "router/gate.cuh"
#include "router/norm.cuh"
#include "run_cluster.h"

using namespace nibble::router;

namespace {

template <class F>
void run(const Problem& p, uint32_t ranks) {
  const uint32_t clusters = (p.tokens + F::kTokens - 1) / F::kTokens;
  for (uint32_t cluster = 0; cluster < clusters; ++cluster) {
    run_cluster(ranks, F::kThreads, shared_bytes<F>(p.experts, ranks), cluster, clusters,
                [&](uint4* memory) { Router<F>(p, ranks, memory).run(); });
  }
}

template <uint32_t Chunks, bool HasNorm>
void run_groups(const Problem& p, uint32_t groups, uint32_t ranks) {
  if (groups == 1) return run<Form<Chunks, 1, HasNorm>>(p, ranks);
  if constexpr (Chunks <= 4) {
    if (groups == 4) return run<Form<Chunks, 4, HasNorm>>(p, ranks);
  }
  run<Form<Chunks, 2, HasNorm>>(p, ranks);
}

template <uint32_t Chunks>
void run_norm(const Problem& p) {
  using N = Norm<Chunks>;
  const uint32_t blocks = (p.tokens + N::kTokens - 1) / N::kTokens;
  for (uint32_t block = 0; block < blocks; ++block) {
    run_cluster(1, N::kThreads, sizeof(typename N::Shared), block, blocks, [&](uint4* memory) {
      N(p, *reinterpret_cast<typename N::Shared*>(memory)).run();
    });
  }
}

template <uint32_t Each>
void run_choice(const Problem& p) {
  for (uint32_t token = 0; token < p.tokens; ++token)
    run_cluster(1, kLanes, 0, token, p.tokens, [&](uint4*) { choose_from_memory<Each>(p, token); });
}

}  // namespace

extern "C" uint32_t problem_bytes() { return sizeof(Problem); }

extern "C" void route_on_the_host(const Problem* problem, uint32_t groups, uint32_t ranks, bool is_late) {
  emulated_is_late = is_late;
  const Problem& p = *problem;
  if (p.columns <= 4 * kChunk * kWarps)
    return p.residual ? run_groups<4, true>(p, groups, ranks) : run_groups<4, false>(p, groups, ranks);
  return p.residual ? run_groups<8, true>(p, groups, ranks) : run_groups<8, false>(p, groups, ranks);
}

extern "C" void norm_on_the_host(const Problem* problem, bool is_late) {
  emulated_is_late = is_late;
  problem->columns <= 4 * kChunk * kWarps ? run_norm<4>(*problem) : run_norm<8>(*problem);
}

extern "C" void choose_on_the_host(const Problem* problem, bool is_late) {
  emulated_is_late = is_late;
  if (problem->experts <= 128) return run_choice<4>(*problem);
  problem->experts <= 256 ? run_choice<8>(*problem) : run_choice<16>(*problem);
}
