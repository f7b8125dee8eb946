// What the launches of decode.cuh's kernels share.
#pragma once

#include <optional>

#include "nibble/cuda.h"
#include "nvfp4_linear/decode.cuh"

namespace nibble::decode {

struct Device {
  uint32_t multiprocessors, shared_bytes;
  bool has_e2m1_instructions;  // in the code compiled for it: arch.h
};

inline Device device_of(int index) {
  int multiprocessors = 0, shared_bytes = 0, major = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index));
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  return {static_cast<uint32_t>(multiprocessors), static_cast<uint32_t>(shared_bytes), major >= 10};
}

inline uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Weight and x of a product; `outputs` rows of the weight, of each expert where there are several.
inline Problem problem_of(const Tensor& x, const Tensor& codes, int64_t outputs, const Tensor& scales) {
  const int64_t columns = x.size(x.dim() - 1);
  require(columns % 32 == 0 && outputs % 8 == 0, "expected columns in 32s and outputs in 8s, found ", columns,
          " and ", outputs);
  Problem problem{};
  problem.x = static_cast<const uint4*>(x.const_data_ptr());
  problem.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  problem.scales = static_cast<const uint32_t*>(scales.const_data_ptr());
  problem.outputs = static_cast<uint32_t>(outputs);
  problem.columns = static_cast<uint32_t>(columns);
  problem.chunks = quotient_up(problem.columns, kChunk);
  problem.groups = quotient_up(problem.outputs / 2, kGroup);
  return problem;
}

// A launch that may begin while the kernel before it ends.
template <class... Parameters, class... Arguments>
void launch_overlapped(void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads,
                       uint32_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)));
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &overlap;
  launch.numAttrs = 1;
  check(cudaLaunchKernelEx(&launch, kernel, arguments...));
}

enum class Operands : int64_t { kBest, kBfloat, kHalf };

// Calls f(type of x, operands), as asked or as is best on the device.
template <class F>
void for_operands(const Tensor& x, int64_t operands, const Device& device, cudaStream_t stream, F&& f) {
  for_cuda_type(x.scalar_type(), [&](auto type) {
    if constexpr (std::is_same_v<typename decltype(type)::type, __nv_bfloat16>) {
      const bool half = operands == static_cast<int64_t>(Operands::kHalf) ||
                        (operands == static_cast<int64_t>(Operands::kBest) && device.has_e2m1_instructions &&
                         use_instructions(x.get_device_index(), stream));
      if (!half) return f(type, TypeOf<BfloatOperand>());
    }
    f(type, TypeOf<HalfOperand>());
  });
}

}  // namespace nibble::decode
