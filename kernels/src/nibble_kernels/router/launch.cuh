// Launches of gate.cuh's kernels. Without torch, so that a test can compile it alone.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "nibble/overlap.cuh"
#include "router/gate.cuh"
#include "router/norm.cuh"

namespace nibble::router {

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1)
    route(const __grid_constant__ Problem problem, const uint32_t ranks) {
  extern __shared__ uint4 memory[];
  Router<F>(problem, ranks, memory).run();
}

template <uint32_t Chunks>
__global__ void __launch_bounds__(Norm<Chunks>::kThreads, 16 / Chunks)
    add_and_norm(const __grid_constant__ Problem problem) {
  __shared__ typename Norm<Chunks>::Shared shared;
  Norm<Chunks>(problem, shared).run();
}

inline constexpr uint32_t kChoiceThreads = 256;
template <uint32_t Each>
__global__ void __launch_bounds__(kChoiceThreads) choose(const __grid_constant__ Problem problem) {
  wait_for_kernel_before();
  const uint32_t token = (blockIdx.x * kChoiceThreads + threadIdx.x) / kLanes;
  if (token < problem.tokens) choose_from_memory<Each>(problem, token);
}

// Whether a device runs clusters of `ranks` blocks of a form; found once for each.
template <class F>
bool has_clusters(int device, uint32_t ranks, uint32_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, uint32_t>, bool> known;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = known.try_emplace({device, ranks});
  if (is_new) {
    cudaFuncSetAttribute(route<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    cudaLaunchAttribute attributes[2]{};
    const cudaLaunchConfig_t config = early_config(attributes, ranks, ranks, F::kThreads, bytes, nullptr);
    int clusters = 0;
    place->second =
        cudaOccupancyMaxActiveClusters(&clusters, route<F>, &config) == cudaSuccess && clusters > 0;
    if (!place->second) cudaGetLastError();
  }
  return place->second;
}

template <class F>
cudaError_t launch_form(const Problem& p, uint32_t ranks, uint32_t multiprocessors, int device,
                        cudaStream_t stream) {
  const uint32_t clusters = (p.tokens + F::kTokens - 1) / F::kTokens;
  const bool is_given = ranks != 0;
  if (!is_given) {
    ranks = kMostRanks;
    while (ranks > 1 && clusters * ranks > multiprocessors) ranks /= 2;
  }
  uint32_t bytes = shared_bytes<F>(p.experts, ranks);
  // Fewer ranks need more shared memory, and the most that SM12x has are 99 KB.
  while (!is_given && ranks < kMostRanks && bytes > 99 * 1024) bytes = shared_bytes<F>(p.experts, ranks *= 2);
  while (!is_given && ranks > 1 && !has_clusters<F>(device, ranks, bytes))
    bytes = shared_bytes<F>(p.experts, ranks /= 2);
  return launch_clusters_early(ranks, clusters * ranks, F::kThreads, bytes, stream, route<F>, p, ranks);
}

template <uint32_t Chunks, bool HasNorm>
cudaError_t launch_columns(const Problem& p, uint32_t groups, uint32_t ranks, uint32_t multiprocessors,
                           int device, cudaStream_t stream) {
  // As few tokens in a block as leave a cluster of 8 blocks for each 8, 16 or 32 of them.
  const uint32_t at_a_time = multiprocessors / kMostRanks * kTokens;
  if (groups == 0) groups = p.tokens <= at_a_time ? 1 : p.tokens <= 2 * at_a_time ? 2 : 4;
  if (groups == 1)
    return launch_form<Form<Chunks, 1, HasNorm>>(p, ranks, multiprocessors, device, stream);
  if constexpr (Chunks <= 4) {
    if (groups == 4)
      return launch_form<Form<Chunks, 4, HasNorm>>(p, ranks, multiprocessors, device, stream);
  }
  return launch_form<Form<Chunks, 2, HasNorm>>(p, ranks, multiprocessors, device, stream);
}

// Groups of 8 tokens in a block and blocks in a cluster, 0 for those that fit the number of tokens.
inline cudaError_t launch(const Problem& p, uint32_t groups, uint32_t ranks, int device, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const auto run = [&](auto launch_them) {
    return launch_them(p, groups, ranks, static_cast<uint32_t>(multiprocessors), device, stream);
  };
  if (p.columns <= 4 * kChunk * kWarps)
    return p.residual ? run(launch_columns<4, true>) : run(launch_columns<4, false>);
  return p.residual ? run(launch_columns<8, true>) : run(launch_columns<8, false>);
}

inline cudaError_t launch_norm(const Problem& p, cudaStream_t stream) {
  using N = Norm<4>;
  static_assert(N::kTokens == Norm<8>::kTokens && N::kThreads == Norm<8>::kThreads);
  const auto kernel = p.columns <= 4 * kChunk * kWarps ? add_and_norm<4> : add_and_norm<8>;
  return launch_early((p.tokens + N::kTokens - 1) / N::kTokens, N::kThreads, 0, stream, kernel, p);
}

inline cudaError_t launch_choice(const Problem& p, cudaStream_t stream) {
  constexpr uint32_t kTokensOfBlock = kChoiceThreads / kLanes;
  const auto run = [&](auto kernel) {
    return launch_early((p.tokens + kTokensOfBlock - 1) / kTokensOfBlock, kChoiceThreads, 0, stream, kernel,
                        p);
  };
  if (p.experts <= 128) return run(choose<4>);
  return p.experts <= 256 ? run(choose<8>) : run(choose<16>);
}

}  // namespace nibble::router
