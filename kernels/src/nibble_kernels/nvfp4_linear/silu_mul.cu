// nibble::silu_mul: what follows torch's product of a fused gate and up layer, in one pass over memory.
#include "nibble/cuda.h"
#include "nibble/overlap.cuh"
#include "nibble/vectors.cuh"

namespace nibble {
namespace {

constexpr uint32_t kThreads = 256, kElements = 8;

// A row has `vectors` of gate, then as many of up.
template <class T>
__global__ void __launch_bounds__(kThreads)
    silu_mul(const uint4* gate_up, uint4* out, uint32_t vectors, uint64_t count) {
  wait_for_kernel_before();
  const uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const uint64_t row = i / vectors, place = row * 2 * vectors + (i - row * vectors);
  Vector<T> gate, up, result;
  gate.words = gate_up[place];
  up.words = gate_up[place + vectors];
#pragma unroll
  for (uint32_t k = 0; k < kElements; ++k) {
    const float x = to_float(gate.elements[k]);
    assign(result.elements[k], __fdividef(x, 1.0f + __expf(-x)) * to_float(up.elements[k]));
  }
  out[i] = result.words;
}

Tensor silu_mul_of(const Tensor& input) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t columns = x.size(x.dim() - 1) / 2;
  require(columns > 0 && x.size(x.dim() - 1) % (2 * kElements) == 0, "expected gate and up of columns in 8s, found ",
          x.size(x.dim() - 1), " for both");
  const Tensor out = torch::stable::new_empty(x, with_last(x, columns), x.scalar_type());
  const int64_t count = out.numel() / kElements;
  if (count == 0) return out;
  for_cuda_type(x.scalar_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    check(launch_early(blocks_of((count + kThreads - 1) / kThreads).x, kThreads, 0, current_stream(x), silu_mul<T>,
                       static_cast<const uint4*>(x.const_data_ptr()), static_cast<uint4*>(out.mutable_data_ptr()),
                       static_cast<uint32_t>(columns / kElements), static_cast<uint64_t>(count)));
  });
  return out;
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("silu_mul", TORCH_BOX(&nibble::silu_mul_of));
}
