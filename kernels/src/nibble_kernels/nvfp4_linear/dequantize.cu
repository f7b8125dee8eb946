// nibble::nvfp4_dequantize_weight: a prepared weight (weight.py) as codes times block scales, exact, for
// products with more rows than decode.cu is for; or those of all experts.
#include "nibble/cuda.h"
#include "nibble/mma_operand.cuh"

namespace nibble {
namespace {

constexpr uint32_t kThreads = 256;

__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void assign(__half& to, float x) { to = __float2half_rn(x); }

// A thread has one block of 16 columns of a row; blockIdx.y is the expert.
template <class Operand, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize(const uint2* codes, const uint8_t* scales, T* out, uint32_t rows, uint32_t blocks) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  const size_t all = size_t{rows} * blocks;
  if (i >= all) return;
  const uint32_t row = static_cast<uint32_t>(i / blocks), block = static_cast<uint32_t>(i % blocks);
  const uint32_t half = rows / 2, upper = row % half;
  const uint32_t chunks = (blocks + 7) / 8, groups = (half + 7) / 8;
  const size_t tile = (size_t{blockIdx.y} * groups + upper / 8) * chunks + block / 8;
  const uint32_t lane = upper % 8 * 4 + block % 8 / 2;
  uint32_t scale[4];
  Operand::scales(scales[(tile * 32 + lane) * 4 + row / half * 2 + block % 2], scale);
  const uint2 words = codes[((tile * 2 + row / half) * 32 + lane) * 2 + block % 2];
  alignas(16) T values[kBlock];
#pragma unroll
  for (uint32_t pair = 0; pair < kBlock / 2; ++pair) {
    uint32_t pairs[4];
    Operand::decode(pair < 4 ? words.x : words.y, pairs);
    const uint32_t product = Operand::multiply(pairs[pair % 4], scale[0]);
    assign(values[2 * pair], Operand::element(product, 0) * Operand::kUnit);
    assign(values[2 * pair + 1], Operand::element(product, 1) * Operand::kUnit);
  }
  uint4* const place = reinterpret_cast<uint4*>(out) + 2 * (blockIdx.y * all + i);
  place[0] = reinterpret_cast<const uint4*>(values)[0];
  place[1] = reinterpret_cast<const uint4*>(values)[1];
}

Tensor nvfp4_dequantize_weight(const Tensor& codes, const Tensor& scales, int64_t rows, bool native,
                               int64_t columns, const Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
  const bool has_experts = codes.dim() == 6;
  const int64_t experts = has_experts ? codes.size(0) : 1, blocks = columns / kBlock;
  const int64_t tiles = experts * ((rows / 2 + 7) / 8) * ((blocks + 7) / 8);
  require(columns % kBlock == 0 && rows % 8 == 0 && codes.numel() == tiles * 1024 &&
              scales.numel() == tiles * 128,
          "codes and scales are not those of prepare_weight");
  const Tensor out = has_experts
                         ? torch::stable::new_empty(like, {experts, rows, columns}, like.scalar_type())
                         : torch::stable::new_empty(like, {rows, columns}, like.scalar_type());
  dim3 grid = blocks_of((rows * blocks + kThreads - 1) / kThreads);
  grid.y = static_cast<uint32_t>(experts);
  for_cuda_type(like.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    for_bool(native, [&](auto is_native) {
      launch(dequantize<std::conditional_t<decltype(is_native)::value, HalfOperand, BfloatOperand>, T>, grid,
             dim3(kThreads), 0, current_stream(codes), static_cast<const uint2*>(codes.const_data_ptr()),
             static_cast<const uint8_t*>(scales.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
             static_cast<uint32_t>(rows), static_cast<uint32_t>(blocks));
    });
  });
  return out;
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_dequantize_weight", TORCH_BOX(&nibble::nvfp4_dequantize_weight));
}
