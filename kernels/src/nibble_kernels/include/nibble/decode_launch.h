// What the launches of decode.cuh's kernels share.
#pragma once

#include <optional>

#include "nibble/cuda.h"
#include "nvfp4_linear/decode.cuh"

namespace nibble::decode {

struct Device {
  uint32_t multiprocessors, shared_bytes;
};

inline Device device_of(int index) {
  int multiprocessors = 0, shared_bytes = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index));
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return {static_cast<uint32_t>(multiprocessors), static_cast<uint32_t>(shared_bytes)};
}

inline uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Weight and x of a product; `outputs` rows of the weight, of each of `experts`.
inline Problem problem_of(const Tensor& x, const Tensor& codes, int64_t outputs, const Tensor& scales,
                          int64_t experts) {
  const int64_t columns = x.size(x.dim() - 1);
  require(columns % 16 == 0 && outputs % 8 == 0, "expected columns in 16s and outputs in 8s, found ", columns,
          " and ", outputs);
  Problem problem{};
  problem.x = static_cast<const uint4*>(x.const_data_ptr());
  problem.codes = static_cast<const uint4*>(codes.const_data_ptr());
  problem.scales = static_cast<const uint32_t*>(scales.const_data_ptr());
  problem.outputs = static_cast<uint32_t>(outputs);
  problem.columns = static_cast<uint32_t>(columns);
  problem.chunks = quotient_up(problem.columns, kChunk);
  problem.groups = quotient_up(problem.outputs / 2, kGroup);
  const int64_t tiles = experts * problem.groups * problem.chunks;
  require(codes.numel() == tiles * 1024 && scales.numel() == tiles * 128, "a weight of ", outputs, " by ",
          columns, " is not what prepare_weight was given");
  return problem;
}

// So that each phase's columns of `tokens` rows of x fit, in phases of equal size.
template <class Form>
uint32_t chunks_per_phase(const Problem& p, uint32_t tokens, const Device& device) {
  if (Form::shared_bytes(p.chunks, tokens, true) <= device.shared_bytes) return p.chunks;
  const uint32_t fixed = Form::shared_bytes(0, tokens, false),
                 each = Form::shared_bytes(1, tokens, false) - fixed;
  require(fixed + each <= device.shared_bytes, "this GPU's ", device.shared_bytes,
          " bytes of shared memory are too few");
  return quotient_up(p.chunks, quotient_up(p.chunks, (device.shared_bytes - fixed) / each));
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

// Calls f(type of x, operands): those of `native` codes are float16, those of shifted ones bfloat16, as x is.
template <class F>
void for_operands(const Tensor& x, bool native, F&& f) {
  for_cuda_type(x.scalar_type(), [&](auto type) {
    if (native) return f(type, TypeOf<HalfOperand>());
    if constexpr (std::is_same_v<typename decltype(type)::type, __nv_bfloat16>) {
      f(type, TypeOf<BfloatOperand>());
    } else {
      require(false, "the weight was prepared for bfloat16 activations");
    }
  });
}

}  // namespace nibble::decode
