// nibble::nvfp4_sparse_linear: checks of its arguments and the launch (launch.cuh).
#include <optional>

#include "nibble/cuda.h"
#include "nvfp4_sparse/launch.cuh"

namespace nibble::sparse {
namespace {

template <class T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

Tensor nvfp4_sparse_linear(const Tensor& input, const Tensor& codes, const Tensor& places,
                           const Tensor& scales, int64_t outputs, bool native, double global_scale,
                           const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                           bool silu_mul) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t columns = x.size(x.dim() - 1), chunks = (columns + kChunk - 1) / kChunk;
  const int64_t tiles = (outputs / 2 + kGroup - 1) / kGroup * chunks;
  require(columns % 16 == 0 && outputs % 8 == 0, "expected columns in 16s and outputs in 8s, found ", columns,
          " and ", outputs);
  require(codes.numel() == tiles * 512 && places.numel() == tiles * 256 && scales.numel() == tiles * 128,
          "a weight of ", outputs, " by ", columns, " is not what pack_sparse was given");
  const bool half = x.scalar_type() == ScalarType::Half;
  require(half == native && (half || x.scalar_type() == ScalarType::BFloat16),
          "expected a weight packed for the activations' type");
  const Tensor out =
      torch::stable::new_empty(x, with_last(x, silu_mul ? outputs / 2 : outputs), x.scalar_type());
  const Problem p{data<uint32_t>(x),
                  data<uint4>(codes),
                  data<uint2>(places),
                  data<uint32_t>(scales),
                  column_scale ? data<float>(*column_scale) : nullptr,
                  bias ? bias->const_data_ptr() : nullptr,
                  out.mutable_data_ptr(),
                  static_cast<float>(global_scale),
                  static_cast<uint32_t>(x.numel() / columns),
                  static_cast<uint32_t>(outputs),
                  static_cast<uint32_t>(columns),
                  static_cast<uint32_t>(chunks),
                  silu_mul};
  const cudaStream_t stream = current_stream(x);
  check(half ? launch<HalfOperand>(p, stream) : launch<BfloatOperand>(p, stream));
  return out;
}

}  // namespace
}  // namespace nibble::sparse

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_sparse_linear", TORCH_BOX(&nibble::sparse::nvfp4_sparse_linear));
}
