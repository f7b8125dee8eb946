// nibble::nvfp4_dequantize_weight: a prepared weight (weight.py) as codes times block scales, exact, for
// products with more rows than decode.cu is for.
#include "nibble/cuda.h"
#include "nibble/mma_operand.cuh"

namespace nibble {
namespace {

constexpr uint32_t kThreads = 256;

// Two values times a power of two.
template <class T>
__device__ __forceinline__ uint32_t times(uint32_t pair, float factor) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(factor));
    return *reinterpret_cast<const uint32_t*>(&product);
  } else {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __float2bfloat162_rn(factor));
    return *reinterpret_cast<const uint32_t*>(&product);
  }
}

// A thread has one block of 16 columns of a row.
template <class Operand>
__global__ void __launch_bounds__(kThreads)
    dequantize(const uint2* codes, const uint8_t* scales, uint4* out, uint32_t rows, uint32_t blocks) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size_t{rows} * blocks) return;
  const uint32_t row = static_cast<uint32_t>(i / blocks), block = static_cast<uint32_t>(i % blocks);
  const uint32_t half = rows / 2, upper = row % half;
  const size_t fragment = size_t{upper / 8} * ((blocks + 7) / 8) + block / 8;
  const uint32_t lane = upper % 8 * 4 + block % 8 / 2;
  uint32_t scale[4];
  Operand::scales(scales[(fragment * 32 + lane) * 4 + row / half * 2 + block % 2], scale);
  const uint2 words = codes[i];
#pragma unroll
  for (uint32_t word = 0; word < 2; ++word) {
    uint32_t pairs[4];
    Operand::decode(word == 0 ? words.x : words.y, pairs);
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
      pairs[pair] =
          times<typename Operand::Element>(Operand::multiply(pairs[pair], scale[0]), Operand::kUnit);
    }
    out[2 * i + word] = Operand::in_order(pairs);
  }
}

Tensor nvfp4_dequantize_weight(const Tensor& codes, const Tensor& scales, const Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
  const int64_t rows = codes.size(0), columns = 2 * codes.size(1), blocks = columns / kBlock;
  require(columns % kBlock == 0 && rows % 8 == 0 &&
              scales.numel() == (rows / 2 + 7) / 8 * ((blocks + 7) / 8) * 128,
          "codes and scales are not those of prepare_weight");
  const Tensor out = torch::stable::new_empty(like, {rows, columns}, like.scalar_type());
  for_cuda_type(like.scalar_type(), [&](auto type) {
    constexpr bool kBfloat = std::is_same_v<typename decltype(type)::type, __nv_bfloat16>;
    launch(dequantize<std::conditional_t<kBfloat, BfloatOperand, HalfOperand>>,
           blocks_of((rows * blocks + kThreads - 1) / kThreads), dim3(kThreads), 0, current_stream(codes),
           static_cast<const uint2*>(codes.const_data_ptr()),
           static_cast<const uint8_t*>(scales.const_data_ptr()), static_cast<uint4*>(out.mutable_data_ptr()),
           static_cast<uint32_t>(rows), static_cast<uint32_t>(blocks));
  });
  return out;
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_dequantize_weight", TORCH_BOX(&nibble::nvfp4_dequantize_weight));
}
