// nibble::rms_norm and add_rms_norm on the GPU: a thread block a row, which it keeps in registers.
#include "nibble/cuda.h"
#include "nibble/overlap.cuh"
#include "nibble/vectors.cuh"

namespace nibble {
namespace {

constexpr uint32_t kMaxThreads = 512, kMostVectors = 8;  // of 16 bytes, of a thread
constexpr uint32_t kMaxColumns = kMaxThreads * kMostVectors * 8;

// In every thread: the warp's sum in the order of a tree, then those of the warps in their order.
__device__ __forceinline__ float sum_of_block(float own) {
  __shared__ float sums[kMaxThreads / 32];
#pragma unroll
  for (uint32_t mask = 1; mask < 32; mask *= 2) own += __shfl_xor_sync(~0u, own, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
  __syncthreads();
  float sum = 0.0f;
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
  return sum;
}

// With a residual, of x plus the residual, and `total` gets the sum. With few vectors a thread, a block has room
// beside one of the product before.
template <class T, uint32_t kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    normalize(const uint4* x, const uint4* residual, const uint4* weight, float epsilon, uint4* out, uint4* total,
              uint32_t vectors) {
  const size_t begin = size_t{blockIdx.x} * vectors;
  Vector<T> first_scale;
  if (threadIdx.x < vectors) first_scale.words = __ldg(weight + threadIdx.x);
  wait_for_kernel_before();
  float own[kVectors][8], squares = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < kVectors; ++i) {
    const uint32_t vector = i * blockDim.x + threadIdx.x;
    if (vector >= vectors) break;
    Vector<T> elements, added, sums;
    elements.words = x[begin + vector];
    if (residual) added.words = residual[begin + vector];
#pragma unroll
    for (uint32_t k = 0; k < 8; ++k) {
      own[i][k] = to_float(elements.elements[k]);
      if (residual) own[i][k] += to_float(added.elements[k]);
      assign(sums.elements[k], own[i][k]);
      squares = fmaf(own[i][k], own[i][k], squares);
    }
    if (residual) total[begin + vector] = sums.words;
  }
  const float factor = rsqrtf(sum_of_block(squares) / static_cast<float>(vectors * 8) + epsilon);
#pragma unroll
  for (uint32_t i = 0; i < kVectors; ++i) {
    const uint32_t vector = i * blockDim.x + threadIdx.x;
    if (vector >= vectors) break;
    Vector<T> results, scale = first_scale;
    if (i != 0) scale.words = __ldg(weight + vector);
#pragma unroll
    for (uint32_t k = 0; k < 8; ++k) {
      T normal;
      assign(normal, own[i][k] * factor);
      assign(results.elements[k], to_float(normal) * to_float(scale.elements[k]));
    }
    out[begin + vector] = results.words;
  }
}

// `residual` may be null, and `total` with it.
void launch_norm(const Tensor& x, const void* residual, const Tensor& weight, double epsilon, const Tensor& out,
                 void* total) {
  const int64_t columns = x.size(x.dim() - 1);
  require(weight.numel() == columns && weight.scalar_type() == x.scalar_type() && weight.is_contiguous(),
          "the norm's weight must have x's type and one element a column");
  require(columns % 8 == 0 && columns > 0 && columns <= kMaxColumns, "expected columns in 8s, up to ",
          kMaxColumns, ", found ", columns);
  const int64_t rows = x.numel() / columns;
  if (rows == 0) return;
  const uint32_t vectors = static_cast<uint32_t>(columns / 8);
  // A few vectors a thread: a row's latency is what its readers wait for.
  uint32_t threads = 32;
  while (threads < vectors && threads < kMaxThreads) threads *= 2;
  for_cuda_type(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel) {
      check(launch_early(blocks_of(rows).x, threads, 0, current_stream(x), kernel,
                         static_cast<const uint4*>(x.const_data_ptr()), static_cast<const uint4*>(residual),
                         static_cast<const uint4*>(weight.const_data_ptr()), static_cast<float>(epsilon),
                         static_cast<uint4*>(out.mutable_data_ptr()), static_cast<uint4*>(total), vectors));
    };
    if (vectors <= threads) return launch(normalize<T, 1>);
    if (vectors <= 2 * threads) return launch(normalize<T, 2>);
    launch(normalize<T, kMostVectors>);
  });
}

Tensor rms_norm(const Tensor& input, const Tensor& weight, double epsilon) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  launch_norm(x, nullptr, weight, epsilon, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& input_residual, const Tensor& weight,
                                        double epsilon) {
  const Tensor x = torch::stable::contiguous(input), residual = torch::stable::contiguous(input_residual);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  require(residual.numel() == x.numel() && residual.scalar_type() == x.scalar_type(),
          "a residual must have x's shape and type");
  const Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  const Tensor total = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  launch_norm(x, residual.const_data_ptr(), weight, epsilon, out, total.mutable_data_ptr());
  return {out, total};
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&nibble::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&nibble::add_rms_norm));
}
