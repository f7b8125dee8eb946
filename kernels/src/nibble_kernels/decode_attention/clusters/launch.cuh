// Launches of decode.cuh's kernel.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "decode_attention/target.cuh"
#include "decode_attention/cache_map.h"
#include "decode_attention/clusters/decode.cuh"

namespace nibble::attention::clusters {

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ CUtensorMap map) {
  if constexpr (is_for_target<false>()) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Attention<Form>(problem, map, *reinterpret_cast<Shared<Form>*>(memory)).run();
  }
}

// A launch that may begin while the kernel before it ends.
template <class Form>
struct Launch {
  std::array<cudaLaunchAttribute, 2> attributes{};
  cudaLaunchConfig_t config{};

  Launch(uint32_t clusters, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {Form::kRanks, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(clusters * Form::kRanks);
    config.blockDim = dim3(Form::kThreads);
    config.dynamicSmemBytes = sizeof(Shared<Form>);
    config.stream = stream;
    config.attrs = attributes.data();
    config.numAttrs = attributes.size();
  }
};

// As many clusters as run at a time; the first call on a device must not be captured.
template <class Form>
cudaError_t resident_clusters(int device, uint32_t& clusters) {
  static std::mutex mutex;
  static std::array<int, kMostDevices> known{};
  const std::lock_guard lock(mutex);
  if (known[device] == 0) {
    cudaError_t error = cudaFuncSetAttribute(attend<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(sizeof(Shared<Form>)));
    if (error != cudaSuccess) return error;
    const Launch<Form> launch(1, nullptr);
    error = cudaOccupancyMaxActiveClusters(&known[device], attend<Form>, &launch.config);
    if (error != cudaSuccess) return error;
    if (known[device] == 0) return cudaErrorInvalidConfiguration;
  }
  clusters = static_cast<uint32_t>(known[device]);
  return cudaSuccess;
}

// Of those that run at a time: how many share a long sequence. With all of them a call takes longer.
inline uint32_t clusters_of_sequence(uint32_t clusters) { return clusters * 5 / 6; }

template <class Form>
cudaError_t launch_form(Problem p, int device, const CacheMap& cache, cudaStream_t stream) {
  static_assert(sizeof(Shared<Form>) <= Form::kSharedBytes);
  uint32_t clusters = 0;
  const cudaError_t error = resident_clusters<Form>(device, clusters);
  if (error != cudaSuccess) return error;
  p.most_whole = p.least_chunk * Form::kWholeChunks;
  p.sharing = clusters_of_sequence(clusters);
  const Launch<Form> launch(clusters, stream);
  return cudaLaunchKernelEx(&launch.config, attend<Form>, p, cache.of_tokens(kTile, Form::kChunks));
}

template <bool IsFp8>
cudaError_t launch_type(const Problem& p, const CacheMap& cache, uint32_t head_dim, int device,
                        cudaStream_t stream) {
  if (p.sequences == 0) return cudaSuccess;
  if (head_dim == 128) return launch_form<Form<128, IsFp8, 1>>(p, device, cache, stream);
  if (slot_rows(p) > 8) return launch_form<Form<64, IsFp8, 2>>(p, device, cache, stream);
  return launch_form<Form<64, IsFp8, 1>>(p, device, cache, stream);
}

}  // namespace nibble::attention::clusters
