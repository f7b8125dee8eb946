// How the work of w4a4.cuh is divided, and its launch: without torch, so that a program of its own can prove
// the kernel (benchmarks/offline_gpu/blackwell_proof.cu).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "nibble/overlap.cuh"
#include "nvfp4_linear/w4a4.cuh"

namespace nibble::w4a4 {

constexpr uint32_t kClearThreads = 256;

// A kernel, because no launch begins early behind a cudaMemsetAsync.
__global__ void __launch_bounds__(kClearThreads) clear_flags(uint32_t* flags, uint32_t count) {
  wait_for_kernel_before();
  for (uint32_t i = threadIdx.x; i < count; i += kClearThreads) flags[i] = 0;
}

template <class T, class Form>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 shared[];
  wait_for_kernel_before();
  Multiplier<Form, Matrix<T, Form>>{{problem}, instruction::shared_place(shared)}.run();
}

// Calls f(form) with the form for a number of tokens.
template <class F>
auto for_form(uint32_t tokens, F&& f) {
  if (tokens <= Few::kTokens) return f(Few());
  if (tokens <= Some::kTokens) return f(Some());
  return f(Many());
}

// One block for each multiprocessor, if there are chunks for all. It decides the order of additions.
inline uint32_t divide(Problem& p, uint32_t multiprocessors) {
  return for_form(p.tokens, [&]<class Form>(Form) {
    p.chunks = (p.columns + kChunk - 1) / kChunk;
    p.groups = (p.output.outputs / 2 + kGroup - 1) / kGroup;
    p.row_blocks = (p.groups + kGroups - 1) / kGroups;
    p.token_tiles = (p.tokens + Form::kTokens - 1) / Form::kTokens;
    return std::min(multiprocessors, p.units() * p.chunks);
  });
}
inline size_t part_bytes(uint32_t tokens, uint32_t blocks) {
  return for_form(tokens, [&]<class Form>(Form) { return size_t{blocks} * Form::kSlots * kLanes * 16; });
}
inline size_t flag_bytes(uint32_t blocks) { return size_t{blocks} * kWarps * 4; }

// Divided for `blocks`; `work` has the bytes of parts and flags. Both kernels may begin while the one before them
// ends, and touch memory after that.
template <class T>
cudaError_t launch(Problem& p, uint32_t blocks, void* work, cudaStream_t stream) {
  p.shares.parts = static_cast<float4*>(work);
  p.shares.flags = reinterpret_cast<uint32_t*>(static_cast<char*>(work) + part_bytes(p.tokens, blocks));
  const cudaError_t error =
      launch_early(1, kClearThreads, 0, stream, clear_flags, p.shares.flags, blocks * kWarps);
  if (error != cudaSuccess) return error;
  return for_form(p.tokens, [&]<class Form>(Form) {
    return launch_early(blocks, kThreads, Form::kSharedBytes, stream, multiply<T, Form>, p);
  });
}

}  // namespace nibble::w4a4
