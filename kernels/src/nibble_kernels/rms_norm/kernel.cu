// nibble::rms_norm and add_rms_norm on the GPU: a thread block a row.
#include "nibble/cuda.h"
#include "nibble/overlap.cuh"
#include "rms_norm/norm.cuh"
#include "rms_norm/norm.h"

namespace nibble::norm {
namespace {

constexpr uint32_t kMaxColumns = kMaxThreads * kMostVectors * 8;

template <class T, uint32_t Vectors>
__global__ void __launch_bounds__(kMaxThreads) normalize(const __grid_constant__ Problem problem) {
  __shared__ float sums[kMaxThreads / 32];
  normalize_row<T, Vectors>(problem, sums, [] { wait_for_kernel_before(); });
}

// `residual` may be null, and `total` with it. tile: 0 for rows.
void launch_norm(const Tensor& x, const void* residual, const Tensor& weight, double epsilon, uint32_t tile,
                 void* out, void* total) {
  const int64_t columns = x.size(x.dim() - 1);
  require(weight.numel() == columns && weight.scalar_type() == x.scalar_type() && weight.is_contiguous(),
          "the norm's weight must have x's type and one element a column");
  require(columns % 8 == 0 && columns > 0 && columns <= kMaxColumns, "expected columns in 8s, up to ",
          kMaxColumns, ", found ", columns);
  const int64_t rows = x.numel() / columns;
  if (rows == 0) return;
  const Problem problem{static_cast<const uint4*>(x.const_data_ptr()),
                        static_cast<const uint4*>(residual),
                        static_cast<const uint4*>(weight.const_data_ptr()),
                        static_cast<float>(epsilon),
                        static_cast<uint4*>(out),
                        static_cast<uint4*>(total),
                        static_cast<uint32_t>(columns / 8),
                        tile};
  // A few vectors a thread: a row's latency is what its readers wait for.
  uint32_t threads = 32;
  while (threads < problem.vectors && threads < kMaxThreads) threads *= 2;
  for_cuda_type(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel) {
      check(launch_early(blocks_of(rows).x, threads, 0, current_stream(x), kernel, problem));
    };
    if (problem.vectors <= threads) return launch(normalize<T, 1>);
    if (problem.vectors <= 2 * threads) return launch(normalize<T, 2>);
    launch(normalize<T, kMostVectors>);
  });
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& input_residual, const Tensor& weight,
                                        double epsilon) {
  const Tensor x = torch::stable::contiguous(input), residual = torch::stable::contiguous(input_residual);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  require(residual.numel() == x.numel() && residual.scalar_type() == x.scalar_type(),
          "a residual must have x's shape and type");
  const Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  const Tensor total = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  launch_norm(x, residual.const_data_ptr(), weight, epsilon, 0, out.mutable_data_ptr(), total.mutable_data_ptr());
  return {out, total};
}

}  // namespace

Tensor rms_norm(const Tensor& input, const Tensor& weight, double epsilon) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  launch_norm(x, nullptr, weight, epsilon, 0, out.mutable_data_ptr(), nullptr);
  return out;
}

void rms_norm_in_order(const Tensor& x, const Tensor& weight, double epsilon, uint32_t tile, void* to) {
  launch_norm(x, nullptr, weight, epsilon, tile, to, nullptr);
}

}  // namespace nibble::norm

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&nibble::norm::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&nibble::norm::add_rms_norm));
}
