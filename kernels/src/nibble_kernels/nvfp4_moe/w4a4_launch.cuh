// The launches of w4a4.cuh, without torch, so that a program of its own can prove the kernels
// (benchmarks/offline_gpu/blackwell_proof.cu).
#pragma once

#include <cuda_runtime.h>

#include "nibble/overlap.cuh"
#include "nvfp4_moe/add_up.cuh"
#include "nvfp4_moe/w4a4.cuh"

namespace nibble::w4a4_experts {

using experts::kSumThreads;
constexpr uint32_t kRowThreads = 256;

__global__ void __launch_bounds__(kRouteThreads)
    order_pairs(const __grid_constant__ Routing routing, uint32_t tokens) {
  extern __shared__ uint32_t counts[];
  __shared__ RoutingTable table;
  wait_for_kernel_before();
  route(routing, tokens, table, counts);
}

template <class T, class Form, class Convert>
__global__ void __launch_bounds__(kRowThreads) quantize(const __grid_constant__ Quantization quantization) {
  wait_for_kernel_before();
  quantize_rows<T, Form, Convert>(quantization);
}

template <class T, class Form>
__global__ void __launch_bounds__(w4a4::kThreads, 1) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  wait_for_kernel_before();
  Multiplier<T, Form>{{problem}, instruction::shared_place(shared)}.run();
}

template <class T>
__global__ void __launch_bounds__(kSumThreads, experts::kSumBlocks)
    add_up(const experts::Chosen chosen, const uint4* products, uint4* out, uint32_t tokens,
           uint32_t pieces) {
  wait_for_kernel_before();
  experts::add_products<T>(blockIdx.x * kSumThreads + threadIdx.x, chosen, products, out, tokens, pieces);
}

// A layer of experts, for some tokens.
struct Layer {
  const uint4* x;        // [tokens, hidden]
  const int32_t* ids;    // [tokens, topk]
  const float* weights;  // [tokens, topk]
  uint4* out;            // [tokens, hidden]
  uint32_t tokens, topk, experts;
  Weight first, second;  // divided
  Activation activation;

  uint32_t pairs() const { return tokens * topk; }
};

// The launches for tiles of a form, one after the other. Thread blocks of a product: one for each
// multiprocessor. It decides the order of additions, with K, N, the form and the tiles before a tile.
template <class T, class Form, class Convert>
class Launches {
 public:
  Launches(const Layer& layer, uint32_t multiprocessors)
      : layer_(layer), blocks_(multiprocessors), workspace_(Workspace::of<Form>(
            layer.pairs(), layer.experts, layer.first.columns, layer.second.columns, layer.second.outputs,
            multiprocessors)) {}

  size_t bytes() const { return static_cast<size_t>(workspace_.parts.bytes); }
  const Workspace& workspace() const { return workspace_; }

  cudaError_t route(void* work, cudaStream_t stream) const {
    const Routing routing{layer_.ids,
                          layer_.weights,
                          layer_.pairs(),
                          layer_.experts,
                          at<Tile>(work, workspace_.tiles),
                          at<Pair>(work, workspace_.pairs),
                          at<uint32_t>(work, workspace_.counts),
                          at<uint32_t>(work, workspace_.flags),
                          2 * flags()};
    return launch_early(1, kRouteThreads, kSlices * layer_.experts * 4, stream, order_pairs, routing,
                        Form::kTokens);
  }

  // The intermediate.
  cudaError_t first(void* work, cudaStream_t stream) const {
    return product(work, stream, layer_.first, layer_.x, workspace_.x, workspace_.inner, false);
  }

  // The output, of the intermediate.
  cudaError_t second(void* work, cudaStream_t stream) const {
    const cudaError_t error = product(work, stream, layer_.second, at<uint4>(work, workspace_.inner),
                                      workspace_.quantized_inner, workspace_.products, true);
    if (error != cudaSuccess) return error;
    const uint32_t pieces = layer_.second.outputs / kVector;
    const experts::Chosen chosen{layer_.ids, layer_.weights, nullptr, layer_.topk, layer_.experts};
    return launch_early(quotient_up(layer_.tokens * pieces, kSumThreads), kSumThreads, 0, stream, add_up<T>,
                        chosen, at<const uint4>(work, workspace_.products), layer_.out, layer_.tokens,
                        pieces);
  }

  cudaError_t all(void* work, cudaStream_t stream) const {
    cudaError_t error = route(work, stream);
    if (error == cudaSuccess) error = first(work, stream);
    return error == cudaSuccess ? second(work, stream) : error;
  }

 private:
  template <class Part>
  static Part* at(void* work, int64_t place) {
    return reinterpret_cast<Part*>(static_cast<char*>(work) + place);
  }
  uint32_t flags() const { return blocks_ * w4a4::kWarps; }

  cudaError_t product(void* work, cudaStream_t stream, const Weight& weight, const uint4* x,
                      int64_t quantized, int64_t out, bool is_second) const {
    const uint32_t* const counts = at<uint32_t>(work, workspace_.counts);
    const Pair* const ordered = at<Pair>(work, workspace_.pairs);
    uint8_t* const to = at<uint8_t>(work, quantized);
    const Quantization quantization{
        x, to, weight.input_scales, ordered, counts, layer_.topk, weight.columns, weight.chunks, is_second};
    const uint32_t warps = layer_.pairs() * quotient_up(weight.chunks, 2);
    const uint32_t row_blocks = std::min(4 * blocks_, quotient_up(warps, kRowThreads / kLanes));
    const cudaError_t error =
        launch_early(row_blocks, kRowThreads, 0, stream, quantize<T, Form, Convert>, quantization);
    if (error != cudaSuccess) return error;
    const Problem problem{weight,
                          to,
                          at<void>(work, out),
                          at<Tile>(work, workspace_.tiles),
                          counts,
                          ordered,
                          layer_.activation,
                          {at<float4>(work, workspace_.shares),
                           at<uint32_t>(work, workspace_.flags) + (is_second ? flags() : 0)},
                          is_second};
    return launch_early(blocks_, w4a4::kThreads, Form::kSharedBytes, stream, multiply<T, Form>, problem);
  }

  Layer layer_;
  uint32_t blocks_;
  Workspace workspace_;
};

}  // namespace nibble::w4a4_experts
