// Launches of decode.cuh's kernel. Without torch, so that a benchmark can compile it alone.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "decode_attention/decode.cuh"
#include "decode_attention/target.cuh"

namespace nibble::attention {

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    attend(const __grid_constant__ Problem problem) {
  if constexpr (is_for_target<Form::kIsSmall>()) {
    extern __shared__ uint4 memory[];
    Attention<Form>(problem, *reinterpret_cast<Shared<Form>*>(memory)).run();
  }
}

// As many blocks as run at a time; the first call on a device must not be captured.
template <class Form>
cudaError_t blocks_at_a_time(int device, const Gpu& gpu, int& blocks) {
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
cudaError_t launch_form(const Problem& problem, int device, const Gpu& gpu, cudaStream_t stream) {
  constexpr int kMostBytes = Form::kIsSmall ? kSmallSharedBytes : (228 / Form::kBlocks - 1) * 1024;
  static_assert(sizeof(Shared<Form>) <= kMostBytes);
  int blocks = 0;
  const cudaError_t error = blocks_at_a_time<Form>(device, gpu, blocks);
  if (error != cudaSuccess) return error;
  const uint64_t pairs = uint64_t{problem.sequences} * problem.kv_heads * row_tiles_of(problem);
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
  return cudaLaunchKernelEx(&config, attend<Form>, problem);
}

template <uint32_t HeadDim, bool IsFp8, uint32_t RowGroups>
cudaError_t launch_rows(const Problem& problem, int device, const Gpu& gpu, cudaStream_t stream) {
  if (gpu.shared_bytes >= kLargeSharedBytes)
    return launch_form<Form<HeadDim, IsFp8, RowGroups, false>>(problem, device, gpu, stream);
  return launch_form<Form<HeadDim, IsFp8, RowGroups, true>>(problem, device, gpu, stream);
}

template <uint32_t HeadDim, bool IsFp8>
cudaError_t launch_size(const Problem& problem, int device, const Gpu& gpu, cudaStream_t stream) {
  if (slot_rows(problem) <= 8) return launch_rows<HeadDim, IsFp8, 1>(problem, device, gpu, stream);
  return launch_rows<HeadDim, IsFp8, 2>(problem, device, gpu, stream);
}

template <bool IsFp8>
cudaError_t launch_type(const Problem& problem, uint32_t head_dim, int device, const Gpu& gpu,
                        cudaStream_t stream) {
  if (head_dim == 64) return launch_size<64, IsFp8>(problem, device, gpu, stream);
  if (head_dim == 128) return launch_size<128, IsFp8>(problem, device, gpu, stream);
  return launch_size<256, IsFp8>(problem, device, gpu, stream);
}

// head_dim: 64, 128 or 256.
inline cudaError_t launch(const Problem& problem, uint32_t head_dim, bool is_fp8, int device,
                          cudaStream_t stream) {
  if (problem.sequences == 0) return cudaSuccess;
  Gpu gpu;
  if (const cudaError_t error = find_gpu(device, gpu); error != cudaSuccess) return error;
  if (is_fp8) return launch_type<true>(problem, head_dim, device, gpu, stream);
  return launch_type<false>(problem, head_dim, device, gpu, stream);
}

}  // namespace nibble::attention
