// nibble::quant_fp4 on the GPU: the largest magnitude where it is not given, then the quantization; no
// synchronization.
#include "nibble/cuda.h"
#include "nibble/quantize.cuh"

#include <optional>

namespace nibble {
namespace {

constexpr int kThreads = 512;

// The bits of non-negative floats are ordered as they are, with NaN above infinity.
template <class T>
__global__ void __launch_bounds__(kThreads)
    largest_magnitude(const uint4* x, int64_t vectors, uint32_t* result) {
  __shared__ uint32_t of_warps[kThreads / 32];
  float largest = 0.0f;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t vector = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; vector + 3 * stride < vectors; vector += 4 * stride) {
    uint4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = __ldg(x + vector + i * stride);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float values[8];
      unpack<T>(raw[i], values);
      largest = maximum(largest, amax8(values));
    }
  }
  for (; vector < vectors; vector += stride) {
    float values[8];
    unpack<T>(__ldg(x + vector), values);
    largest = maximum(largest, amax8(values));
  }
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint32_t of_block =
      __reduce_max_sync(0xffffffffu, threadIdx.x < kThreads / 32 ? of_warps[threadIdx.x] : 0);
  if (threadIdx.x == 0) atomicMax(result, of_block);
}

int multiprocessors(int device) {
  int count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

Tensor find_amax(const Tensor& x, cudaStream_t stream) {
  Tensor amax = torch::stable::new_empty(x, std::vector<int64_t>(), ScalarType::Float);
  check(cudaMemsetAsync(amax.mutable_data_ptr(), 0, sizeof(float), stream));
  const int64_t vectors = x.numel() / kVector;
  const int64_t blocks =
      std::min<int64_t>((vectors + kThreads - 1) / kThreads, 4 * multiprocessors(x.get_device_index()));
  for_cuda_type(x.scalar_type(), [&](auto type) {
    launch(largest_magnitude<typename decltype(type)::type>, blocks_of(blocks), kThreads, 0, stream,
           static_cast<const uint4*>(x.const_data_ptr()), vectors,
           static_cast<uint32_t*>(amax.mutable_data_ptr()));
  });
  return amax;
}

std::tuple<Tensor, Tensor, Tensor> quant_fp4(const Tensor& input, const std::optional<Tensor>& given_amax,
                                             bool four_over_six, double scale_override, bool tiled,
                                             bool exact) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const Shape shape = shape_of(x, x.size(x.dim() - 1));
  if (given_amax) check_scalar(*given_amax, "amax");
  const Tensor amax = given_amax ? *given_amax : find_amax(x, stream);
  auto [packed, scales] = empty_outputs(x, shape, tiled);
  Tensor tensor_scale = torch::stable::new_empty(x, std::vector<int64_t>(), ScalarType::Float);
  if (shape.rows == 0) torch::stable::fill_(tensor_scale, 1.0);
  const Output output{static_cast<uint32_t*>(packed.mutable_data_ptr()),
                      static_cast<uint8_t*>(scales.mutable_data_ptr())};
  for_cuda_type(x.scalar_type(), [&](auto type) {
    for_bool(use_instructions(x.get_device_index(), stream), [&](auto instructions) {
      for_bool(exact, [&](auto with_exact) {
        for_bool(four_over_six, [&](auto two_candidates) {
          for_bool(tiled, [&](auto layout) {
            using Convert = std::conditional_t<decltype(instructions)::value, Instructions, Software>;
            using Precision = std::conditional_t<decltype(with_exact)::value, Exact, Approximate>;
            using Rule = TensorScale<Convert, Precision, decltype(two_candidates)::value>;
            using Elements = Plain<typename decltype(type)::type>;
            constexpr bool kTiled = decltype(layout)::value;
            const typename Rule::Parameters parameters{static_cast<const float*>(amax.const_data_ptr()),
                                                       static_cast<float*>(tensor_scale.mutable_data_ptr()),
                                                       static_cast<float>(scale_override)};
            const Grid grid = grid_of<kTiled>(shape, !given_amax);
            launch(quantize<Elements, Rule, kTiled>, thread_blocks<Elements, kTiled>(grid), dim3(32, kWarps),
                   0, stream, Elements{static_cast<const uint4*>(x.const_data_ptr())}, parameters, output,
                   grid);
          });
        });
      });
    });
  });
  return {packed, scales, tensor_scale};
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) { library.impl("quant_fp4", TORCH_BOX(&nibble::quant_fp4)); }
