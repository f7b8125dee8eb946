// nibble::e4m3_decode_linear: nvfp4_linear/decode.cuh with an E4M3 weight in rows.
#include "nvfp4_linear/decode_linear.cuh"

namespace nibble::decode {
namespace {

Tensor e4m3_decode_linear(const Tensor& x, const Tensor& weight, const Tensor& scales,
                          const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& residual, bool silu_mul,
                          const std::vector<int64_t>& division) {
  require(x.scalar_type() == ScalarType::BFloat16, "an E4M3 weight needs bfloat16 activations");
  require(weight.is_contiguous() && reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % 16 == 0,
          "expected the weight's rows one after the other, from a multiple of 16 bytes on");
  require(weight.numel() / (16 * kChunk) < 1 << 21, "a weight of ", weight.numel(), " elements is too large");
  const int64_t outputs = weight.size(0);
  require(!column_scale || column_scale->numel() == outputs, "expected a column scale for each output");
  const Epilogue epilogue{1.0, column_scale, bias, residual, silu_mul};
  return multiply_linear<E4m3Rows>(x, weight, scales, outputs, epilogue, division, [&](Run& run) {
    for_forms<LargeE4m3RowsForms, SmallE4m3RowsForms>(run.device, [&](auto forms) {
      multiply_all<__nv_bfloat16, E4m3Operand, decltype(forms)>(run, false);
    });
  });
}

}  // namespace
}  // namespace nibble::decode

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("e4m3_decode_linear", TORCH_BOX(&nibble::decode::e4m3_decode_linear));
}
