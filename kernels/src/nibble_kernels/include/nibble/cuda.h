// Host side of the CUDA operators: the current stream, launches that are checked, and the choice of
// conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "tensors.h"

namespace nibble {

inline void check(cudaError_t error) { require(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error)); }

inline uint32_t multiprocessors_of(const Tensor& x) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, x.get_device_index()));
  return static_cast<uint32_t>(count);
}

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Whether the device's conversion instructions are used: found once a device by running them against the
// software (conversions/probe.cu). While a stream is being captured nothing can be found, and the software is
// used.
bool use_instructions(int device, cudaStream_t stream);

// bfloat16 or float16 in CUDA's own types.
template <class F>
void for_cuda_type(ScalarType type, F&& f) {
  for_float_type<false>(type, [&](auto found) {
    constexpr bool bfloat16 = std::is_same_v<typename decltype(found)::type, torch::headeronly::BFloat16>;
    f(TypeOf<std::conditional_t<bfloat16, __nv_bfloat16, __half>>());
  });
}

// A number of thread blocks as CUDA takes it.
inline dim3 blocks_of(int64_t count) {
  require(count < int64_t{1} << 31, "too many elements for one launch");
  return dim3(static_cast<uint32_t>(count));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  if (blocks.x == 0 || blocks.y == 0) return;
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
  check(cudaGetLastError());
}

}  // namespace nibble
