// Runs the blocks of a cluster on the host.
#pragma once

#include "nibble/tensor_core.cuh"

// Calls f(shared memory) in each thread of the blocks of one of the grid's clusters.
template <class F>
void run_cluster(uint32_t ranks, uint32_t threads, size_t bytes, uint32_t cluster, uint32_t clusters, F&& f) {
  // NaN, so that what was not written would show.
  const std::vector<uint4> unwritten(bytes / sizeof(uint4) + 1, make_uint4(~0u, ~0u, ~0u, ~0u));
  EmulatedCluster shared{EmulatedBarrier(ranks * threads), std::vector(ranks, unwritten),
                         std::vector(ranks, threads)};
  std::vector<std::unique_ptr<EmulatedBlock>> blocks;
  EmulatedLanes lanes;
  blockDim = {threads};
  gridDim = {clusters * ranks};
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    blocks.push_back(std::make_unique<EmulatedBlock>(threads, rank));
    for (uint32_t thread = 0; thread < threads; ++thread) {
      lanes.add({thread}, {cluster * ranks + rank}, blocks.back().get(), &shared,
                [&, rank, memory = shared.memory[rank].data()] {
                  f(memory);
                  --shared.running[rank];
                });
    }
  }
  lanes.run();
  if (emulated_copies.empty() && emulated_slow_copies.empty()) return;
  std::fprintf(stderr, "%zu copies are not waited for\n", emulated_copies.size() + emulated_slow_copies.size());
  std::abort();
}
