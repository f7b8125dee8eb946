// What the launches of decode.cuh's kernels share.
#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "nibble/cuda.h"
#include "nvfp4_linear/decode.cuh"

namespace nibble::decode {

struct Device {
  int index;
  uint32_t multiprocessors, shared_bytes;
};

inline Device device_of(int index) {
  int multiprocessors = 0, shared_bytes = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index));
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return {index, static_cast<uint32_t>(multiprocessors), static_cast<uint32_t>(shared_bytes)};
}

// Calls f(forms) with those that a device's shared memory is made for.
template <class Large = LargeForms, class Small = SmallForms, class F>
void for_forms(const Device& device, F&& f) {
  if (device.shared_bytes < 128 * 1024) return f(Small());
  f(Large());
}

inline uint32_t quotient_up(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Weight and x of a product; `outputs` rows of the weight, of each of `experts`.
template <class Format = Nvfp4>
Problem problem_of(const Tensor& x, const Tensor& codes, int64_t outputs, const Tensor& scales,
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
  const int64_t bytes = Format::kInRows ? experts * outputs * columns : tiles * Format::kCodes * 16;
  require(codes.numel() == bytes && scales.numel() * scales.element_size() == tiles * Format::kScales * 4,
          "a weight of ", outputs, " by ",
          columns, " is not what prepare_weight was given");
  return problem;
}

// The chunks of `all` that fit with `tokens` rows of x, in phases of equal size.
template <class Form>
uint32_t chunks_per_phase(uint32_t all, uint32_t tokens, const Device& device) {
  if (Form::shared_bytes(all, tokens, true) <= device.shared_bytes) return all;
  const uint32_t fixed = Form::shared_bytes(0, tokens, true),
                 each = Form::shared_bytes(1, tokens, true) - fixed;
  require(fixed + each <= device.shared_bytes, "this GPU's ", device.shared_bytes,
          " bytes of shared memory are too few");
  return quotient_up(all, quotient_up(all, (device.shared_bytes - fixed) / each));
}

// A launch that may begin while the kernel before it ends.
struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(uint32_t blocks, uint32_t ranks, uint32_t threads, uint32_t shared_bytes, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = ranks;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = ranks > 1 ? 2 : 1;
  }
  Launch(const Launch&) = delete;

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), const Arguments&... arguments) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.dynamicSmemBytes)));
    check(cudaLaunchKernelEx(&config, kernel, arguments...));
  }
};

// Clusters of `ranks` thread blocks with so much shared memory that the device runs at a time, 0 without
// clusters. Some of its multiprocessors may have no neighbours left for one. Found once for each kernel,
// which Kernel tells apart.
template <auto Kernel>
uint32_t clusters_at_a_time(uint32_t ranks, uint32_t threads, uint32_t shared_bytes, const Device& device) {
  if (ranks == 1) return device.multiprocessors;
  static std::mutex mutex;
  static std::map<std::pair<int, uint32_t>, uint32_t> known;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = known.try_emplace({device.index, ranks});
  if (is_new) {
    check(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)));
    const Launch launch(device.multiprocessors / ranks * ranks, ranks, threads, shared_bytes, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, Kernel, &launch.config) != cudaSuccess) {
      cudaGetLastError();
      clusters = 0;
    }
    place->second = std::min(static_cast<uint32_t>(clusters), device.multiprocessors / ranks);
  }
  return place->second;
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
