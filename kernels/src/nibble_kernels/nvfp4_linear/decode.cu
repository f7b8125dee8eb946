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

namespace {

// Of up to kMostNormRows rows; `set` sets up the problem's part of the norm.
template <Norm Beside, class F>
void multiply_beside(const Tensor& x, const Weight& weight, const std::optional<Tensor>& residual, bool silu_mul,
                         const Tensor& out, F&& set) {
  const Device device = device_of(x.get_device_index());
  const Epilogue epilogue{weight.global_scale, weight.column_scale, weight.bias, residual, silu_mul};
  Run run{linear_problem<Nvfp4>(x, weight.codes, weight.scales, weight.outputs, epilogue, out), device, {},
          current_stream(x)};
  const uint32_t tokens = run.problem.tokens;
  require(tokens <= kMostNormRows, "expected at most ", kMostNormRows, " rows beside a norm, found ", tokens);
  set(run.problem);
  require(!weight.native && x.scalar_type() == ScalarType::BFloat16, "expected bfloat16 beside a norm");
  for_forms(device, [&](auto forms) {
    using Form = typename decltype(forms)::Few::template With<Beside>;
    multiply_some<__nv_bfloat16, BfloatOperand, Form>(run, tokens > 4 ? 8 : 4);
  });
}

}  // namespace

Unscaled multiply_before_norm(const Tensor& x, const Weight& weight, const Tensor& residual,
                              const Tensor& norm_weight, const Tensor& out) {
  require_norm(norm_weight, weight, out);
  const int64_t rows = x.numel() / x.size(x.dim() - 1), groups = quotient_up(weight.outputs / 2, kGroup);
  int64_t tile = 1;  // a power of two
  while (tile < rows) tile *= 2;
  const Unscaled unscaled{torch::stable::new_empty(out, out.sizes(), out.scalar_type()),
                          torch::stable::new_empty(out, {groups, tile}, ScalarType::Float), groups};
  multiply_beside<Norm::after>(x, weight, residual, false, out,
                               [&](Problem& p) { p.norm_after = norm_after(unscaled, norm_weight); });
  return unscaled;
}

void multiply_after_norm(const Unscaled& x, double epsilon, const Weight& weight, bool silu_mul, const Tensor& out) {
  multiply_beside<Norm::before>(x.x, weight, {}, silu_mul, out,
                                [&](Problem& p) { p.norm_before = norm_before(x, epsilon); });
}

}  // namespace nibble::decode

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_decode_linear", TORCH_BOX(&nibble::decode::nvfp4_decode_linear));
}
