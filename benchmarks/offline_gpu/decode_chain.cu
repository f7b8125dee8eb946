// Time of the decode kernel in a layer of Qwen3-8B's shape: its four products one after the other in a CUDA graph,
// each of which may begin while the one before ends, then each product alone. Without torch.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
//     -I kernels/src/nibble_kernels -I kernels/src/nibble_kernels/include -o decode_chain \
//     benchmarks/offline_gpu/decode_chain.cu
//   ./decode_chain
//
// Weights are random and differ from layer to layer; `o` and `down` add a residual. One or two blocks of a cluster divide
// the columns, whichever is faster alone. Medians, in µs: a layer without norms, with a norm's kernel before qkv and
// gate_up, and with the norms inside the products; then each product alone.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "nvfp4_linear/decode.cuh"
#include "product_chain.cuh"

using namespace nibble::decode;
using nibble::BfloatOperand;

namespace {

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  const Share share = share_of(problem.groups, blockIdx.x / problem.ranks, gridDim.x / problem.ranks,
                               problem.groups_per_cluster);
  Multiplier<__nv_bfloat16, BfloatOperand, Form>(problem, share, shared).run();
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
  char *weights, *activations, *squares;
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

// `ranks` blocks divide the columns.
template <class Form>
void launch(const Buffers& buffers, Problem p, uint32_t ranks) {
  const auto up = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
  const uint32_t chunks = up(p.chunks, ranks), clusters = std::min(buffers.multiprocessors / ranks, p.groups);
  const uint32_t fixed = Form::shared_bytes(0, p.tokens, true),
                 each = Form::shared_bytes(1, p.tokens, true) - fixed;
  p.ranks = ranks;
  p.chunks_per_phase = up(chunks, up(chunks, (buffers.shared_bytes - fixed) / each));
  p.groups_per_cluster = p.groups / clusters;
  const uint32_t bytes =
      std::max(Form::shared_bytes(p.chunks_per_phase, p.tokens, true), buffers.shared_bytes / 2 + 1024);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {ranks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = clusters * ranks, config.blockDim = Form::kThreads, config.dynamicSmemBytes = bytes;
  config.stream = buffers.stream, config.attrs = attributes, config.numAttrs = ranks > 1 ? 2 : 1;
  check(cudaFuncSetAttribute(multiply<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  check(cudaLaunchKernelEx(&config, multiply<Form>, p));
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
  check(cudaMalloc(&buffers.squares, 1 << 20));
  check(cudaMemset(buffers.squares, 0, 1 << 20));
  check(cudaStreamCreate(&buffers.stream));
  std::printf("%s\ntokens    layer  kernels   inside", device.name);
  for (const Shape& shape : kShapes) std::printf("%9s", shape.name);
  const auto print = [&]<class Form>(uint32_t tokens) {
    uint32_t ranks[4] = {1, 1, 1, 1};
    const void* const norm_weight = buffers.activations + 3 * size_t{4 << 20};
    const auto time = [&](int only, Norms norms = Norms::none) {  // of a layer, or of one of its products
      return microseconds(buffers.stream, [&] {
        bool swap = false;
        for (int layer = 0; layer < kLayers; ++layer) {
          size_t weight = layer * layer_bytes;
          for (int i = 0; i < 4; ++i) {
            Problem p = problem_of(buffers, kShapes[i], weight, tokens, swap);
            if (norms == Norms::kernels && i % 2 == 0)
              norm(buffers.stream, p.out, norm_weight, const_cast<uint4*>(p.x), tokens, p.columns, 0);
            if (norms == Norms::inside && (only < 0 || only == i)) {
              uint32_t tile = 1;
              while (tile < tokens) tile *= 2;
              float* const squares = reinterpret_cast<float*>(buffers.squares);
              if constexpr (Form::kTokenGroups == 1) {
                if (i % 2 == 0) {
                  p.norm_before = {squares, 256, 1e-6f, tile};
                  launch<typename Form::template With<nibble::Norm::before>>(buffers, p, ranks[i]);
                } else {
                  p.norm_after = {norm_weight, p.out, squares, tile};
                  p.out = buffers.activations + 2 * size_t{4 << 20};
                  launch<typename Form::template With<nibble::Norm::after>>(buffers, p, ranks[i]);
                }
              }
            } else if (norms != Norms::inside && (only < 0 || only == i)) {
              launch<Form>(buffers, p, ranks[i]);
            }
            swap = !swap;
            weight += kShapes[i].bytes();
          }
        }
      });
    };
    float alone[4];
    for (int i = 0; i < 4; ++i) {
      alone[i] = time(i);
      ranks[i] = 2;
      const float in_two = time(i);
      if (in_two < alone[i]) {
        alone[i] = in_two;
      } else {
        ranks[i] = 1;
      }
    }
    std::printf("\n%6u%9.2f%9.2f", tokens, time(-1), time(-1, Norms::kernels));
    std::printf("%9.2f", Form::kTokenGroups == 1 ? time(-1, Norms::inside) : 0.0f);
    for (const float us : alone) std::printf("%9.2f", us);
    if constexpr (Form::kTokenGroups == 1) {
      std::printf("   with norms");
      for (int i = 0; i < 4; ++i) std::printf("%9.2f", time(i, Norms::inside));
    }
  };
  for (const uint32_t tokens : {1, 2, 4, 8}) print.template operator()<LargeForms::Few>(tokens);
  print.template operator()<LargeForms::Some>(16);
  std::printf("\n");
}
