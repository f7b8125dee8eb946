// Launches of decode.cuh's kernel. Without torch, so that a benchmark can compile it alone.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "decode_attention/decode.cuh"

namespace nibble::attention {

inline constexpr int kMostDevices = 64;
// A block's shared memory: on SM12x, and where the larger forms are taken.
inline constexpr int kSmallSharedBytes = 99 * 1024, kLargeSharedBytes = 128 * 1024;

template <class Form>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks)
    attend(const __grid_constant__ Problem problem) {
  extern __shared__ uint4 memory[];
  Attention<Form>(problem, *reinterpret_cast<Shared<Form>*>(memory)).run();
}

struct Gpu {
  int multiprocessors, shared_bytes;
};

inline cudaError_t find_gpu(int device, Gpu& gpu) {
  cudaError_t error = cudaDeviceGetAttribute(&gpu.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&gpu.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
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

template <class Form, int MostSharedBytes = 227 * 1024>
cudaError_t launch_form(const Problem& problem, int device, const Gpu& gpu, cudaStream_t stream) {
  static_assert(sizeof(Shared<Form>) <= MostSharedBytes);
  int blocks = 0;
  const cudaError_t error = blocks_at_a_time<Form>(device, gpu, blocks);
  if (error != cudaSuccess) return error;
  const uint64_t most =
      uint64_t{problem.sequences} * problem.kv_heads * row_tiles_of(problem) * problem.most_splits;
  if (most < static_cast<uint64_t>(blocks)) blocks = static_cast<int>(most);
  attend<Form><<<blocks, Form::kThreads, sizeof(Shared<Form>), stream>>>(problem);
  return cudaGetLastError();
}

template <bool IsFp8>
cudaError_t launch_type(const Problem& problem, uint32_t head_dim, int device, const Gpu& gpu,
                        cudaStream_t stream) {
  const bool is_large = gpu.shared_bytes >= kLargeSharedBytes;
  if (head_dim == 64)
    return launch_form<Form<64, IsFp8, 4, 2>, kSmallSharedBytes>(problem, device, gpu, stream);
  if (head_dim == 128) {
    if (is_large) return launch_form<Form<128, IsFp8, 4, 3>>(problem, device, gpu, stream);
    return launch_form<Form<128, IsFp8, 4, 2>, kSmallSharedBytes>(problem, device, gpu, stream);
  }
  if (is_large) return launch_form<Form<256, IsFp8, 4, IsFp8 ? 2 : 3>>(problem, device, gpu, stream);
  return launch_form<Form<256, IsFp8, IsFp8 ? 4 : 2, 2>, kSmallSharedBytes>(problem, device, gpu, stream);
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
