// nibble::nvfp4_decode_linear.
#include "nvfp4_linear/decode_linear.cuh"
#include "nvfp4_linear/linear.h"

namespace nibble::decode {

Tensor nvfp4_decode_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t outputs,
                           bool native, double global_scale, const std::optional<Tensor>& column_scale,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                           bool silu_mul, bool batch_invariant, const std::vector<int64_t>& division) {
  const Epilogue epilogue{global_scale, column_scale, bias, residual, silu_mul};
  return multiply_linear<Nvfp4>(x, codes, scales, outputs, epilogue, division, [&](Run& run) {
    for_operands(x, native, [&](auto type, auto operand) {
      for_forms(run.device, [&](auto forms) {
        multiply_all<typename decltype(type)::type, typename decltype(operand)::type, decltype(forms)>(
            run, batch_invariant);
      });
    });
  });
}

}  // namespace nibble::decode

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_decode_linear", TORCH_BOX(&nibble::decode::nvfp4_decode_linear));
}
