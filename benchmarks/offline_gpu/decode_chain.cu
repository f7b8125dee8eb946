// Time of the decode kernel in a layer of Qwen3-8B's shape: its four products one after the other in a CUDA graph,
// each of which may begin while the one before ends, then each product alone. Without torch.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
//     -I kernels/src/nibble_kernels -I kernels/src/nibble_kernels/include -o decode_chain \
//     benchmarks/offline_gpu/decode_chain.cu
//   ./decode_chain
//
// Weights are random and differ from layer to layer; `o` and `down` add a residual. Medians, in µs a layer. With 16
// tokens x is there before the first product ("staged"), with one or two blocks that divide the columns, whichever is
// faster, or it arrives meanwhile ("arriving").
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "nvfp4_linear/arrival.h"
#include "nvfp4_linear/decode.cuh"

using namespace nibble::decode;
using nibble::BfloatOperand;

namespace {

constexpr int kLayers = 8, kRounds = 9;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  const Share share = share_of(problem.groups, blockIdx.x / problem.ranks, gridDim.x / problem.ranks,
                               problem.groups_per_cluster);
  Multiplier<__nv_bfloat16, BfloatOperand, Form>(problem, share, shared).run();
}

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1)
    multiply_arriving(const __grid_constant__ Problem problem, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(ArrivingX<Form>::kAlignment) uint4 aligned[];
  const Share share = share_of(problem.groups, blockIdx.x / problem.ranks, gridDim.x / problem.ranks,
                               problem.groups_per_cluster);
  Multiplier<__nv_bfloat16, BfloatOperand, Form, InOrder, ArrivingX<Form>>(problem, share, aligned, {}, map).run();
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

Problem problem_of(const Buffers& buffers, const Shape& shape, size_t weight, uint32_t tokens, bool swap) {
  constexpr size_t kStep = 4 << 20;
  Problem p{};
  p.x = reinterpret_cast<const uint4*>(buffers.activations + swap * kStep);
  p.out = buffers.activations + !swap * kStep;
  if (shape.residual) p.residual = buffers.activations + 2 * kStep;
  p.codes = reinterpret_cast<const uint4*>(buffers.weights + weight);
  p.scales = reinterpret_cast<const uint32_t*>(buffers.weights + weight + shape.code_bytes());
  p.upper_global_scale = p.lower_global_scale = 1e-3f;
  p.tokens = tokens, p.outputs = shape.outputs, p.columns = shape.columns, p.silu_mul = shape.silu_mul;
  p.chunks = shape.columns / kChunk, p.groups = shape.outputs / (2 * kGroup);
  return p;
}

template <class... Parameters>
void launch(const Buffers& buffers, void (*kernel)(Parameters...), uint32_t blocks, uint32_t cluster,
            uint32_t threads, uint32_t bytes, const Parameters&... parameters) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads;
  config.dynamicSmemBytes = std::max(bytes, buffers.shared_bytes / 2 + 1024);
  config.stream = buffers.stream, config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(config.dynamicSmemBytes)));
  check(cudaLaunchKernelEx(&config, kernel, parameters...));
}

// x that is there before the first product; `ranks` blocks divide the columns.
template <class Form>
void launch_staged(const Buffers& buffers, Problem p, uint32_t ranks) {
  const auto up = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
  const uint32_t chunks = up(p.chunks, ranks), clusters = std::min(buffers.multiprocessors / ranks, p.groups);
  const uint32_t fixed = Form::shared_bytes(0, p.tokens, true),
                 each = Form::shared_bytes(1, p.tokens, true) - fixed;
  p.ranks = ranks;
  p.chunks_per_phase = up(chunks, up(chunks, (buffers.shared_bytes - fixed) / each));
  p.groups_per_cluster = p.groups / clusters;
  launch(buffers, multiply<Form>, clusters * ranks, ranks, Form::kThreads,
         Form::shared_bytes(p.chunks_per_phase, p.tokens, true), p);
}

CUtensorMap map_of_x(const Problem& p, uint32_t box_rows) {
  static void* encode = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (!encode)
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result));
  CUtensorMap map{};
  const cuuint64_t sizes[] = {32, p.columns / 32, p.tokens}, bytes[] = {64, uint64_t{p.columns} * 2};
  const cuuint32_t box[] = {32, 4, box_rows}, steps[] = {1, 1, 1};
  const CUresult code = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<uint4*>(p.x), sizes, bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) std::exit(1);
  return map;
}

template <class Form>
void launch_arriving(const Buffers& buffers, Problem p) {
  const Arrival arrival = *arrival_of<Form>(p.groups, p.chunks, buffers.shared_bytes, [&](uint32_t blocks) {
    return buffers.multiprocessors / blocks;
  });
  p.ranks = arrival.ranks, p.sharers = arrival.sharers;
  p.chunks_per_phase = p.chunks / p.ranks, p.chunks_per_segment = arrival.chunks_per_segment;
  p.places = arrival.places, p.groups_per_cluster = p.groups / arrival.clusters;
  launch(buffers, multiply_arriving<Form>, arrival.clusters * p.ranks, p.ranks * p.sharers, Form::kThreads,
         ArrivingX<Form>::shared_bytes(p.places * p.chunks_per_segment, p.ranks > 1), p,
         map_of_x(p, Form::kTokens));
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
  std::printf("%s\n%-12s  layer", device.name, "tokens");
  for (const Shape& shape : kShapes) std::printf("%9s", shape.name);
  // launch(problem, the number of its shape)
  const auto run = [&](uint32_t tokens, int only, auto&& launch) {
    bool swap = false;
    for (int layer = 0; layer < kLayers; ++layer) {
      size_t weight = layer * layer_bytes;
      for (int i = 0; i < 4; ++i) {
        if (only < 0 || only == i) launch(problem_of(buffers, kShapes[i], weight, tokens, swap), i);
        swap = !swap;
        weight += kShapes[i].bytes();
      }
    }
  };
  const auto print = [&](const char* name, uint32_t tokens, auto&& launch) {
    std::printf("\n%-12s%7.2f", name, microseconds(buffers, [&] { run(tokens, -1, launch); }));
    for (int i = 0; i < 4; ++i) std::printf("%9.2f", microseconds(buffers, [&] { run(tokens, i, launch); }));
  };
  const auto print_staged = [&]<class Form>(const char* name, uint32_t tokens) {
    uint32_t ranks[4];
    for (int i = 0; i < 4; ++i) {
      float times[2];
      for (uint32_t k = 0; k < 2; ++k)
        times[k] = microseconds(buffers, [&] {
          run(tokens, i, [&](const Problem& p, int) { launch_staged<Form>(buffers, p, k + 1); });
        });
      ranks[i] = times[1] < times[0] ? 2 : 1;
    }
    print(name, tokens, [&](const Problem& p, int i) { launch_staged<Form>(buffers, p, ranks[i]); });
  };
  print_staged.template operator()<LargeForms::Few>("1", 1);
  print_staged.template operator()<LargeForms::Few>("2", 2);
  print_staged.template operator()<LargeForms::Few>("4", 4);
  print_staged.template operator()<LargeForms::Few>("8", 8);
  print_staged.template operator()<LargeForms::Some>("16 staged", 16);
  print("16 arriving", 16, [&](const Problem& p, int) { launch_arriving<LargeForms::Some>(buffers, p); });
  std::printf("\n");
}
