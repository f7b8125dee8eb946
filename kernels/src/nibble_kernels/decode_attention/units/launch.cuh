// Launches of decode.cuh's kernel.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "decode_attention/target.cuh"
#include "decode_attention/units/cache_map.h"
#include "decode_attention/units/decode.cuh"

namespace nibble::attention::units {

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ CUtensorMap map) {
  if constexpr (is_for_target<Form::kIsSmall>()) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Attention<Form>(problem, map, *reinterpret_cast<Shared<Form>*>(memory)).run();
  }
}

// As many blocks as run at a time; the first call on a device must not be captured.
template <class Form>
cudaError_t resident_blocks(int device, const Gpu& gpu, int& blocks) {
  static std::mutex mutex;
  static std::array<int, kMostDevices> known{};
  const std::lock_guard lock(mutex);
  if (known[device] == 0) {
    const int bytes = static_cast<int>(sizeof(Shared<Form>));
    cudaError_t error =
        cudaFuncSetAttribute(attend<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    int each = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, attend<Form>, Form::kThreads, bytes);
    if (error != cudaSuccess) return error;
    if (each == 0) return cudaErrorInvalidConfiguration;
    known[device] = each * gpu.multiprocessors;
  }
  blocks = known[device];
  return cudaSuccess;
}

template <class Form>
cudaError_t launch_form(const Problem& problem, int device, const Gpu& gpu, const CacheMap& cache,
                        cudaStream_t stream) {
  static_assert(sizeof(Shared<Form>) <= Form::kSharedBytes);
  int blocks = 0;
  const cudaError_t error = resident_blocks<Form>(device, gpu, blocks);
  if (error != cudaSuccess) return error;
  const uint64_t pairs =
      uint64_t{problem.sequences} * (problem.kv_heads / Form::kHeads) * row_tiles_of(problem);
  const uint64_t most = pairs * problem.most_splits;
  if (most < static_cast<uint64_t>(blocks)) blocks = static_cast<int>(most);
  // It may begin while the kernel before it ends.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(Form::kThreads);
  config.dynamicSmemBytes = sizeof(Shared<Form>);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, attend<Form>, problem, cache.of_tiles(Form::kChunks, Form::kHeads));
}

template <uint32_t HeadDim, bool IsFp8, uint32_t RowGroups>
cudaError_t launch_rows(const Problem& p, int form, int device, const Gpu& gpu, const CacheMap& cache,
                        cudaStream_t stream) {
  constexpr uint32_t kEights = HeadDim <= 128 ? 2 : 1;  // blocks of 8 warps on a multiprocessor
  if (gpu.shared_bytes < kLargeSharedBytes)
    return launch_form<Form<HeadDim, IsFp8, RowGroups, 4, 1, 1, true>>(p, device, gpu, cache, stream);
  if constexpr (RowGroups == 2) {
    constexpr uint32_t kWarps = HeadDim <= 128 ? 8 : 4;
    return launch_form<Form<HeadDim, IsFp8, 2, kWarps, 1, 1, false>>(p, device, gpu, cache, stream);
  } else {
    if constexpr (HeadDim != 64) {
      const bool has_pairs = p.kv_heads % 2 == 0;
      if (form == 3 && has_pairs)
        return launch_form<Form<HeadDim, IsFp8, 1, 8, kEights, 2, false>>(p, device, gpu, cache, stream);
      if (form == 4 && has_pairs)
        return launch_form<Form<HeadDim, IsFp8, 1, 4, 2 * kEights, 2, false>>(p, device, gpu, cache, stream);
      if (form == 2 || form == 4)
        return launch_form<Form<HeadDim, IsFp8, 1, 4, 2 * kEights, 1, false>>(p, device, gpu, cache, stream);
      if (form == 5)
        return launch_form<Reads<Form<HeadDim, IsFp8, 1, 8, kEights, 1, false>>>(p, device, gpu, cache,
                                                                                 stream);
      if (form == 6 && has_pairs)
        return launch_form<Reads<Form<HeadDim, IsFp8, 1, 8, kEights, 2, false>>>(p, device, gpu, cache,
                                                                                 stream);
    }
    return launch_form<Form<HeadDim, IsFp8, 1, 8, kEights, 1, false>>(p, device, gpu, cache, stream);
  }
}

template <uint32_t HeadDim, bool IsFp8>
cudaError_t launch_size(const Problem& p, int form, int device, const Gpu& gpu, const CacheMap& cache,
                        cudaStream_t stream) {
  if (slot_rows(p) <= 8) return launch_rows<HeadDim, IsFp8, 1>(p, form, device, gpu, cache, stream);
  return launch_rows<HeadDim, IsFp8, 2>(p, form, device, gpu, cache, stream);
}

template <bool IsFp8>
cudaError_t launch_type(const Problem& p, const CacheMap& cache, uint32_t head_dim, int form, int device,
                        cudaStream_t stream) {
  if (p.sequences == 0) return cudaSuccess;
  Gpu gpu;
  if (const cudaError_t error = find_gpu(device, gpu); error != cudaSuccess) return error;
  if (head_dim == 64) return launch_size<64, IsFp8>(p, form, device, gpu, cache, stream);
  if (head_dim == 128) return launch_size<128, IsFp8>(p, form, device, gpu, cache, stream);
  return launch_size<256, IsFp8>(p, form, device, gpu, cache, stream);
}

}  // namespace nibble::attention::units
