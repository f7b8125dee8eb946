// nibble::e2m1_encode, e2m1_decode, e4m3_encode and e4m3_decode on the GPU.
#include "nibble/cuda.h"
#include "nibble/quantize.cuh"

namespace nibble {
namespace {

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, class Convert>
__global__ void encode_e2m1(const T* x, uint8_t* packed, int64_t bytes) {
  const int64_t first = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  float values[8];
  for (int i = 0; i < 8; ++i) values[i] = first + i / 2 < bytes ? as_float(x[2 * first + i]) : 0.0f;
  const uint32_t codes = Convert::e2m1_encode8(values);
  for (int i = 0; i < 4 && first + i < bytes; ++i) packed[first + i] = codes >> 8 * i;
}

__global__ void decode_e2m1(const uint8_t* packed, float* x, int64_t bytes) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= bytes) return;
  x[2 * index] = e2m1_decode(packed[index] & 15);
  x[2 * index + 1] = e2m1_decode(packed[index] >> 4);
}

template <class T, class Convert>
__global__ void encode_e4m3(const T* x, uint8_t* codes, int64_t count) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < count) codes[index] = Convert::e4m3_encode(as_float(x[index]));
}

__global__ void decode_e4m3(const uint8_t* codes, float* x, int64_t count) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < count) x[index] = e4m3_decode(codes[index]);
}

constexpr int kThreads = 256;

dim3 blocks_for(int64_t threads) { return blocks_of((threads + kThreads - 1) / kThreads); }

// Calls f(pointer to x's elements, conversions).
template <class F>
void with_elements(const Tensor& x, cudaStream_t stream, F&& f) {
  for_bool(use_instructions(x.get_device_index(), stream), [&](auto instructions) {
    using Convert = std::conditional_t<decltype(instructions)::value, Instructions, Software>;
    if (x.scalar_type() == ScalarType::Float)
      return f(static_cast<const float*>(x.const_data_ptr()), Convert());
    for_cuda_type(x.scalar_type(), [&](auto type) {
      f(static_cast<const typename decltype(type)::type*>(x.const_data_ptr()), Convert());
    });
  });
}

Tensor encode_e2m1_op(const Tensor& input) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  const int64_t columns = x.size(x.dim() - 1);
  require(columns % 2 == 0, "two E2M1 codes share a byte, found rows of ", columns);
  Tensor packed = torch::stable::new_empty(x, with_last(x, columns / 2), ScalarType::Byte);
  const int64_t bytes = packed.numel();
  with_elements(x, stream, [&](auto from, auto convert) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    launch(encode_e2m1<T, decltype(convert)>, blocks_for((bytes + 3) / 4), kThreads, 0, stream, from,
           static_cast<uint8_t*>(packed.mutable_data_ptr()), bytes);
  });
  return packed;
}

Tensor decode_e2m1_op(const Tensor& input) {
  const Tensor packed = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(packed.get_device_index());
  Tensor x = torch::stable::new_empty(packed, with_last(packed, packed.size(packed.dim() - 1) * 2),
                                      ScalarType::Float);
  launch(decode_e2m1, blocks_for(packed.numel()), kThreads, 0, current_stream(packed),
         static_cast<const uint8_t*>(packed.const_data_ptr()), static_cast<float*>(x.mutable_data_ptr()),
         packed.numel());
  return x;
}

Tensor encode_e4m3_op(const Tensor& input) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  Tensor codes = torch::stable::new_empty(x, x.sizes(), ScalarType::Float8_e4m3fn);
  with_elements(x, stream, [&](auto from, auto convert) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    launch(encode_e4m3<T, decltype(convert)>, blocks_for(x.numel()), kThreads, 0, stream, from,
           static_cast<uint8_t*>(codes.mutable_data_ptr()), x.numel());
  });
  return codes;
}

Tensor decode_e4m3_op(const Tensor& input) {
  const Tensor codes = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(codes.get_device_index());
  Tensor x = torch::stable::new_empty(codes, codes.sizes(), ScalarType::Float);
  launch(decode_e4m3, blocks_for(codes.numel()), kThreads, 0, current_stream(codes),
         static_cast<const uint8_t*>(codes.const_data_ptr()), static_cast<float*>(x.mutable_data_ptr()),
         codes.numel());
  return x;
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("e2m1_encode", TORCH_BOX(&nibble::encode_e2m1_op));
  library.impl("e2m1_decode", TORCH_BOX(&nibble::decode_e2m1_op));
  library.impl("e4m3_encode", TORCH_BOX(&nibble::encode_e4m3_op));
  library.impl("e4m3_decode", TORCH_BOX(&nibble::decode_e4m3_op));
}
