// What programs that time a layer's chained products have in common. Without torch.
#pragma once

#include <algorithm>
#include <functional>

#include "device_memory.cuh"
#include "nibble/overlap.cuh"
#include "rms_norm/norm.cuh"

constexpr int kLayers = 8, kRounds = 9;

// Where the norms between products are: nowhere, in kernels, or inside the products.
enum class Norms { none, kernels, inside };

// Of each of kLayers layers that enqueue() puts into a graph: the median.
inline float microseconds(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times(kRounds);
  for (float& ms : times) {
    check(cudaGraphLaunch(exec, stream));
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(exec, stream));
    check(cudaEventRecord(end, stream));
    check(cudaStreamSynchronize(stream));
    check(cudaEventElapsedTime(&ms, begin, end));
  }
  std::sort(times.begin(), times.end());
  check(cudaGraphExecDestroy(exec));
  check(cudaGraphDestroy(graph));
  return times[kRounds / 2] * 1000 / kLayers;
}

__global__ void __launch_bounds__(nibble::norm::kMaxThreads)
    normalize(const __grid_constant__ nibble::norm::Problem problem) {
  __shared__ float sums[nibble::norm::kMaxThreads / 32];
  nibble::norm::normalize_row<__nv_bfloat16, 1>(problem, sums, [] { nibble::wait_for_kernel_before(); });
}

// A norm of tokens of at most 4096 columns; tile: norm::Problem's.
inline void norm(cudaStream_t stream, const void* x, const void* weight, void* out, uint32_t tokens, uint32_t columns,
                 uint32_t tile) {
  const nibble::norm::Problem problem{static_cast<const uint4*>(x), nullptr, static_cast<const uint4*>(weight), 1e-6f,
                                      static_cast<uint4*>(out),     nullptr, columns / 8, tile};
  check(nibble::launch_early(tokens, nibble::norm::kMaxThreads, 0, stream, normalize, problem));
}
