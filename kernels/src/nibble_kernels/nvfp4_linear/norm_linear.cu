// nibble::nvfp4_norm_linear and nvfp4_norm_mlp: products of a norm's result.
//
// Where the warpgroup kernel multiplies, the norm and silu · mul write the next product's x in its order. No kernel
// has to order it, which takes 1.5 to 3 µs each time (docs/kernels/nvfp4_linear.md).
#include "nibble/cuda.h"
#include "nvfp4_linear/linear.h"
#include "nvfp4_linear/warpgroup_form.h"
#include "rms_norm/norm.h"

namespace nibble {
namespace {

// With x in order the warpgroup kernel is faster from fewer rows on. Measured on an H200.
constexpr int64_t kMostDecodeRowsInOrder = 8;

int64_t rows_of(const Tensor& x) { return x.numel() / x.size(x.dim() - 1); }

// Whether x comes in order, for products of these outputs and columns.
bool comes_in_order(const Tensor& x, int64_t outputs, int64_t columns, bool batch_invariant) {
  return !batch_invariant && columns % warpgroup::kChunk == 0 &&
         takes_warpgroup(x.get_device_index(), kMostDecodeRowsInOrder, rows_of(x), outputs, columns);
}

Tensor norm_in_order(const Tensor& x, const Tensor& weight, double epsilon) {
  const int64_t rows = rows_of(x);
  const Tensor ordered = warpgroup::ordered_like(x, rows, x.size(x.dim() - 1));
  norm::rms_norm_in_order(x, weight, epsilon, warpgroup::ordered_tile(rows), ordered.mutable_data_ptr());
  return ordered;
}

Tensor multiply(const Tensor& x, const Weight& w, const std::optional<Tensor>& residual, bool silu_mul,
                bool batch_invariant) {
  return nvfp4_weight_linear(x, w.codes, w.scales, w.outputs, w.native, w.global_scale, w.column_scale, w.bias,
                             residual, silu_mul, batch_invariant);
}

Tensor nvfp4_norm_linear(const Tensor& input, const Tensor& norm_weight, double epsilon, const Tensor& codes,
                         const Tensor& scales, int64_t outputs, bool native, double global_scale,
                         const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                         bool batch_invariant) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Weight weight{codes, scales, outputs, native, global_scale, column_scale, bias};
  if (!comes_in_order(x, outputs, x.size(x.dim() - 1), batch_invariant))
    return multiply(norm::rms_norm(x, norm_weight, epsilon), weight, {}, false, batch_invariant);
  const Tensor out = torch::stable::new_empty(x, with_last(x, outputs), x.scalar_type());
  warpgroup::multiply_ordered(norm_in_order(x, norm_weight, epsilon), rows_of(x), weight, {}, false, false, out);
  return out;
}

Tensor nvfp4_norm_mlp(const Tensor& input, const Tensor& norm_weight, double epsilon, bool native,
                      const Tensor& gate_up_codes, const Tensor& gate_up_scales, int64_t gate_up_outputs,
                      double gate_up_global_scale, const std::optional<Tensor>& gate_up_column_scale,
                      const std::optional<Tensor>& gate_up_bias, const Tensor& down_codes,
                      const Tensor& down_scales, int64_t down_outputs, double down_global_scale,
                      const std::optional<Tensor>& down_column_scale, const std::optional<Tensor>& down_bias,
                      bool batch_invariant) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Weight gate_up{gate_up_codes,        gate_up_scales,       gate_up_outputs, native,
                       gate_up_global_scale, gate_up_column_scale, gate_up_bias},
      down{down_codes, down_scales, down_outputs, native, down_global_scale, down_column_scale, down_bias};
  const int64_t columns = x.size(x.dim() - 1), between_columns = gate_up_outputs / 2, rows = rows_of(x);
  if (!comes_in_order(x, gate_up_outputs, columns, batch_invariant) ||
      !comes_in_order(x, down_outputs, between_columns, batch_invariant)) {
    const Tensor between =
        multiply(norm::rms_norm(x, norm_weight, epsilon), gate_up, {}, true, batch_invariant);
    return multiply(between, down, x, false, batch_invariant);
  }
  const Tensor between = warpgroup::ordered_like(x, rows, between_columns);
  warpgroup::multiply_ordered(norm_in_order(x, norm_weight, epsilon), rows, gate_up, {}, true, true, between);
  const Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  warpgroup::multiply_ordered(between, rows, down, x, false, false, out);
  return out;
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_norm_linear", TORCH_BOX(&nibble::nvfp4_norm_linear));
  library.impl("nvfp4_norm_mlp", TORCH_BOX(&nibble::nvfp4_norm_mlp));
}
