// nibble::nvfp4_weight_linear: the kernel for a number of rows. gpu.py has the operator for other devices.
//
// A step of a small model has more than a hundred of these calls, and a choice in Python takes longer than
// the kernel that it starts.
#include <array>

#include "nibble/cuda.h"
#include "nvfp4_linear/linear.h"

namespace nibble {
namespace {

// As in gpu.py. Measured on an H200: docs/kernels/nvfp4_linear.md.
constexpr int64_t kMostDecodeRows = 64, kMostDecodeRowsSm90 = 16, kMostWarpgroupRows = 1024;
// Up to so many multiply-adds (60 µs on an H200) a product of many rows takes no longer than starting the
// kernels of the other way.
constexpr int64_t kFewProducts = int64_t{1} << 34;

bool has_warpgroup_products(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

template <class... Arguments>
Tensor call(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

bool takes_warpgroup(int device, int64_t above, int64_t rows, int64_t outputs, int64_t columns) {
  return rows > above && has_warpgroup_products(device) &&
         (rows <= kMostWarpgroupRows || rows * outputs * columns <= kFewProducts);
}

Tensor nvfp4_weight_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t outputs,
                           bool native, double global_scale, const std::optional<Tensor>& column_scale,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                           bool silu_mul, bool batch_invariant) {
  const int64_t columns = x.size(x.dim() - 1), rows = x.numel() / columns;
  if (!batch_invariant && takes_warpgroup(x.get_device_index(), kMostDecodeRowsSm90, rows, outputs, columns))
    return warpgroup::nvfp4_warpgroup_linear(x, codes, scales, outputs, native, global_scale, column_scale,
                                             bias, residual, silu_mul, {});
  if (batch_invariant || rows <= kMostDecodeRows)
    return decode::nvfp4_decode_linear(x, codes, scales, outputs, native, global_scale, column_scale, bias,
                                       residual, silu_mul, batch_invariant, {});
  return call("nibble::nvfp4_dense_linear", x, codes, scales, outputs, native, global_scale, column_scale, bias,
              residual, silu_mul);
}

}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_weight_linear", TORCH_BOX(&nibble::nvfp4_weight_linear));
}
