// Time of the decode kernel in a layer of Qwen3-8B's shape: its four products one after the other in a CUDA graph,
// each of which may begin while the one before ends, then each product alone. Without torch.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -arch=sm_90a -I kernels/src/nibble_kernels \
//     -I kernels/src/nibble_kernels/include -o decode_chain benchmarks/offline_gpu/decode_chain.cu
//   ./decode_chain
//
// Weights are random and differ from layer to layer; `o` and `down` add a residual. Medians, in µs a layer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "nvfp4_linear/decode.cuh"

using namespace nibble::decode;
using Few = LargeForms::Few;

namespace {

constexpr int kLayers = 8, kRounds = 9;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

__global__ void __launch_bounds__(Few::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  const Share share = share_of(problem.groups, blockIdx.x, gridDim.x, problem.groups_per_cluster);
  Multiplier<__nv_bfloat16, nibble::BfloatOperand, Few>(problem, share, shared).run();
}

struct Shape {
  const char* name;
  uint32_t outputs, columns;
  bool silu_mul, residual;
  size_t code_bytes() const { return size_t{outputs} * columns / 2; }
  size_t bytes() const { return size_t{outputs} * columns / 16 * 9; }
};
constexpr Shape kShapes[] = {{"qkv", 6144, 4096, false, false},
                             {"o", 4096, 4096, false, true},
                             {"gate_up", 24576, 4096, true, false},
                             {"down", 4096, 12288, false, true}};

struct Buffers {
  char *weights, *activations;
  cudaStream_t stream;
  uint32_t multiprocessors, shared_bytes;
};

void launch(const Buffers& buffers, const Shape& shape, size_t weight, uint32_t tokens, bool swap) {
  constexpr size_t kStep = 4 << 20;
  Problem p{};
  p.x = reinterpret_cast<const uint4*>(buffers.activations + swap * kStep);
  p.out = buffers.activations + !swap * kStep;
  if (shape.residual) p.residual = buffers.activations + 2 * kStep;
  p.codes = reinterpret_cast<const uint4*>(buffers.weights + weight);
  p.scales = reinterpret_cast<const uint32_t*>(buffers.weights + weight + shape.code_bytes());
  p.upper_global_scale = p.lower_global_scale = 1e-3f;
  p.tokens = tokens, p.outputs = shape.outputs, p.columns = shape.columns, p.silu_mul = shape.silu_mul;
  p.chunks = p.chunks_per_phase = shape.columns / kChunk, p.groups = shape.outputs / (2 * kGroup), p.ranks = 1;
  const uint32_t blocks = std::min(buffers.multiprocessors, p.groups);
  p.groups_per_cluster = p.groups / blocks;
  const uint32_t bytes = std::max(Few::shared_bytes(p.chunks, tokens, false), buffers.shared_bytes / 2 + 1024);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = Few::kThreads, config.dynamicSmemBytes = bytes;
  config.stream = buffers.stream, config.attrs = &early, config.numAttrs = 1;
  check(cudaFuncSetAttribute(multiply, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  check(cudaLaunchKernelEx(&config, multiply, p));
}

float microseconds(const Buffers& buffers, const std::function<void()>& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  check(cudaStreamBeginCapture(buffers.stream, cudaStreamCaptureModeGlobal));
  enqueue();
  check(cudaStreamEndCapture(buffers.stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times(kRounds);
  for (float& ms : times) {
    check(cudaGraphLaunch(exec, buffers.stream));
    check(cudaEventRecord(begin, buffers.stream));
    check(cudaGraphLaunch(exec, buffers.stream));
    check(cudaEventRecord(end, buffers.stream));
    check(cudaStreamSynchronize(buffers.stream));
    check(cudaEventElapsedTime(&ms, begin, end));
  }
  std::sort(times.begin(), times.end());
  check(cudaGraphExecDestroy(exec));
  check(cudaGraphDestroy(graph));
  return times[kRounds / 2] * 1000 / kLayers;
}

}  // namespace

int main() {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0));
  Buffers buffers{};
  buffers.multiprocessors = device.multiProcessorCount, buffers.shared_bytes = device.sharedMemPerBlockOptin;
  size_t layer_bytes = 0;
  for (const Shape& shape : kShapes) layer_bytes += shape.bytes();
  std::vector<uint32_t> words(layer_bytes / 4);
  for (uint32_t i = 0, seed = 1; i < words.size(); ++i) words[i] = (seed = seed * 1664525 + 1013904223) & 0x7e7e7e7e;
  check(cudaMalloc(&buffers.weights, kLayers * layer_bytes));
  for (int i = 0; i < kLayers; ++i)
    check(cudaMemcpy(buffers.weights + i * layer_bytes, words.data(), layer_bytes, cudaMemcpyHostToDevice));
  check(cudaMalloc(&buffers.activations, 16 << 20));
  check(cudaMemset(buffers.activations, 0, 16 << 20));
  check(cudaStreamCreate(&buffers.stream));
  std::printf("%s\ntokens  layer", device.name);
  for (const Shape& shape : kShapes) std::printf("%9s", shape.name);
  for (const uint32_t tokens : {1, 2, 4, 8}) {
    const auto run = [&](const Shape* only) {
      bool swap = false;
      for (int layer = 0; layer < kLayers; ++layer) {
        size_t weight = layer * layer_bytes;
        for (const Shape& shape : kShapes) {
          if (!only || only == &shape) launch(buffers, shape, weight, tokens, swap);
          swap = !swap;
          weight += shape.bytes();
        }
      }
    };
    const bool fits = Few::shared_bytes(kShapes[3].columns / kChunk, tokens, false) <= buffers.shared_bytes;
    std::printf("\n%6u", tokens);
    if (fits) std::printf("%7.2f", microseconds(buffers, [&] { run(nullptr); }));
    for (const Shape& shape : kShapes) {
      if (Few::shared_bytes(shape.columns / kChunk, tokens, false) > buffers.shared_bytes) continue;
      std::printf("%9.2f", microseconds(buffers, [&] { run(&shape); }));
    }
  }
  std::printf("\n");
}
