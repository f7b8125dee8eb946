// nibble::nvfp4_norm_linear, nvfp4_norm_mlp and nvfp4_between_attentions: products of a norm's result.
//
// Where the warpgroup kernel multiplies, the norm and silu · mul write the next product's x in its order. No kernel
// has to order it, which takes 1.5 to 3 µs each time. Up to kMostNormTokens rows the norms between products need no
// kernel: the product before leaves sums of squares, and the one after multiplies its sums by the factors
// (docs/kernels/nvfp4_linear.md).
#include "nibble/cuda.h"
#include "nvfp4_linear/linear.h"
#include "nvfp4_linear/warpgroup_form.h"
#include "rms_norm/norm.h"

namespace nibble {

NormBefore norm_before(const Unscaled& x, double epsilon) {
  return {static_cast<const float*>(x.squares.const_data_ptr()), static_cast<uint32_t>(x.parts),
          static_cast<float>(epsilon), static_cast<uint32_t>(x.squares.size(1))};
}

NormAfter norm_after(const Unscaled& to, const Tensor& norm_weight) {
  return {norm_weight.const_data_ptr(), to.x.mutable_data_ptr(), static_cast<float*>(to.squares.mutable_data_ptr()),
          static_cast<uint32_t>(to.squares.size(1))};
}

void require_norm(const Tensor& norm_weight, const Weight& weight, const Tensor& out) {
  require(norm_weight.numel() == weight.outputs && norm_weight.scalar_type() == out.scalar_type() &&
              norm_weight.is_contiguous(),
          "the norm's weight must have x's type and one element a column");
}

namespace {

// With x in order the warpgroup kernel is faster from fewer rows on. Measured on an H200.
constexpr int64_t kMostDecodeRowsInOrder = 8;

int64_t rows_of(const Tensor& x) { return x.numel() / x.size(x.dim() - 1); }

struct RmsNorm {
  const Tensor& weight;
  double epsilon;
};

// Whether x comes in order, for a weight of these columns.
bool comes_in_order(const Tensor& x, const Weight& weight, int64_t columns, bool batch_invariant) {
  return !batch_invariant && columns % warpgroup::kChunk == 0 &&
         takes_warpgroup(x.get_device_index(), kMostDecodeRowsInOrder, rows_of(x), weight.outputs, columns);
}

Tensor norm_in_order(const Tensor& x, const RmsNorm& norm) {
  const int64_t rows = rows_of(x);
  const Tensor ordered = warpgroup::ordered_like(x, rows, x.size(x.dim() - 1));
  norm::rms_norm_in_order(x, norm.weight, norm.epsilon, warpgroup::ordered_tile(rows), ordered.mutable_data_ptr());
  return ordered;
}

Tensor multiply(const Tensor& x, const Weight& w, const std::optional<Tensor>& residual, bool silu_mul,
                bool batch_invariant) {
  return nvfp4_weight_linear(x, w.codes, w.scales, w.outputs, w.native, w.global_scale, w.column_scale, w.bias,
                             residual, silu_mul, batch_invariant);
}

Tensor norm_linear(const Tensor& x, const RmsNorm& norm, const Weight& weight, bool batch_invariant) {
  if (!comes_in_order(x, weight, x.size(x.dim() - 1), batch_invariant))
    return multiply(norm::rms_norm(x, norm.weight, norm.epsilon), weight, {}, false, batch_invariant);
  const Tensor out = torch::stable::new_empty(x, with_last(x, weight.outputs), x.scalar_type());
  warpgroup::multiply_ordered(norm_in_order(x, norm), rows_of(x), weight, {}, false, false, out);
  return out;
}

// x plus the MLP's result of the normed x.
Tensor norm_mlp(const Tensor& x, const RmsNorm& norm, const Weight& gate_up, const Weight& down,
                bool batch_invariant) {
  const int64_t between_columns = gate_up.outputs / 2, rows = rows_of(x);
  if (!comes_in_order(x, gate_up, x.size(x.dim() - 1), batch_invariant) ||
      !comes_in_order(x, down, between_columns, batch_invariant)) {
    const Tensor normal = norm::rms_norm(x, norm.weight, norm.epsilon);
    return multiply(multiply(normal, gate_up, {}, true, batch_invariant), down, x, false, batch_invariant);
  }
  const Tensor between = warpgroup::ordered_like(x, rows, between_columns);
  warpgroup::multiply_ordered(norm_in_order(x, norm), rows, gate_up, {}, true, true, between);
  const Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  warpgroup::multiply_ordered(between, rows, down, x, false, false, out);
  return out;
}

std::tuple<Tensor, Tensor> with_norms_inside(const Tensor& attended, const Tensor& stream, const Weight& o,
                                             const RmsNorm& norm, const Weight& gate_up, const Weight& down,
                                             const RmsNorm& next_norm, const Weight& qkv) {
  const auto like_stream = [&] { return torch::stable::new_empty(stream, stream.sizes(), stream.scalar_type()); };
  const auto with_columns = [&](int64_t columns) {
    return torch::stable::new_empty(stream, with_last(stream, columns), stream.scalar_type());
  };
  const int64_t rows = rows_of(stream), between_columns = gate_up.outputs / 2;
  const Tensor middle = like_stream(), out = like_stream(), next = with_columns(qkv.outputs);
  if (rows <= decode::kMostNormRows) {
    const Tensor between = with_columns(between_columns);
    Unscaled normal = decode::multiply_before_norm(attended, o, stream, norm.weight, middle);
    decode::multiply_after_norm(normal, norm.epsilon, gate_up, true, between);
    normal = decode::multiply_before_norm(between, down, middle, next_norm.weight, out);
    decode::multiply_after_norm(normal, next_norm.epsilon, qkv, false, next);
  } else {
    const Tensor between = warpgroup::ordered_like(stream, rows, between_columns);
    Unscaled normal = warpgroup::multiply_before_norm(attended, false, rows, o, stream, norm.weight, middle);
    warpgroup::multiply_after_norm(normal, norm.epsilon, rows, gate_up, true, true, between);
    normal = warpgroup::multiply_before_norm(between, true, rows, down, middle, next_norm.weight, out);
    warpgroup::multiply_after_norm(normal, next_norm.epsilon, rows, qkv, false, false, next);
  }
  return {out, next};
}

Tensor nvfp4_norm_linear(const Tensor& input, const Tensor& norm_weight, double epsilon, const Tensor& codes,
                         const Tensor& scales, int64_t outputs, bool native, double global_scale,
                         const std::optional<Tensor>& column_scale, const std::optional<Tensor>& bias,
                         bool batch_invariant) {
  const Tensor x = torch::stable::contiguous(input);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Weight weight{codes, scales, outputs, native, global_scale, column_scale, bias};
  return norm_linear(x, {norm_weight, epsilon}, weight, batch_invariant);
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
  return norm_mlp(x, {norm_weight, epsilon}, gate_up, down, batch_invariant);
}

std::tuple<Tensor, Tensor> nvfp4_between_attentions(
    const Tensor& attended_input, const Tensor& stream_input, bool native, const Tensor& o_codes,
    const Tensor& o_scales, int64_t o_outputs, double o_global_scale, const std::optional<Tensor>& o_column_scale,
    const std::optional<Tensor>& o_bias, const Tensor& norm_weight, double epsilon, const Tensor& gate_up_codes,
    const Tensor& gate_up_scales, int64_t gate_up_outputs, double gate_up_global_scale,
    const std::optional<Tensor>& gate_up_column_scale, const std::optional<Tensor>& gate_up_bias,
    const Tensor& down_codes, const Tensor& down_scales, int64_t down_outputs, double down_global_scale,
    const std::optional<Tensor>& down_column_scale, const std::optional<Tensor>& down_bias,
    const Tensor& next_norm_weight, double next_epsilon, const Tensor& qkv_codes, const Tensor& qkv_scales,
    int64_t qkv_outputs, double qkv_global_scale, const std::optional<Tensor>& qkv_column_scale,
    const std::optional<Tensor>& qkv_bias, bool batch_invariant) {
  const Tensor attended = torch::stable::contiguous(attended_input), stream = torch::stable::contiguous(stream_input);
  const torch::stable::accelerator::DeviceGuard guard(stream.get_device_index());
  const Weight o{o_codes, o_scales, o_outputs, native, o_global_scale, o_column_scale, o_bias},
      gate_up{gate_up_codes,        gate_up_scales,       gate_up_outputs, native,
              gate_up_global_scale, gate_up_column_scale, gate_up_bias},
      down{down_codes, down_scales, down_outputs, native, down_global_scale, down_column_scale, down_bias},
      qkv{qkv_codes, qkv_scales, qkv_outputs, native, qkv_global_scale, qkv_column_scale, qkv_bias};
  const RmsNorm norm{norm_weight, epsilon}, next_norm{next_norm_weight, next_epsilon};
  const int64_t hidden = stream.size(stream.dim() - 1), between_columns = gate_up_outputs / 2, rows = rows_of(stream);
  // Without the norm's factors float16 could overflow.
  const bool has_range = stream.scalar_type() == ScalarType::BFloat16 && !native;
  const bool few = !batch_invariant && rows > 0 && rows <= decode::kMostNormRows;
  const bool in_order = rows <= warpgroup::kMostNormTokens && comes_in_order(stream, qkv, hidden, batch_invariant) &&
                        comes_in_order(stream, down, between_columns, batch_invariant);
  if (has_range && (few || in_order)) return with_norms_inside(attended, stream, o, norm, gate_up, down, next_norm, qkv);
  const Tensor middle = multiply(attended, o, stream, false, batch_invariant);
  const Tensor out = norm_mlp(middle, norm, gate_up, down, batch_invariant);
  return {out, norm_linear(out, next_norm, qkv, batch_invariant)};
}

}  // namespace
}  // namespace nibble

STABLE_TORCH_LIBRARY_IMPL(nibble, CUDA, library) {
  library.impl("nvfp4_norm_linear", TORCH_BOX(&nibble::nvfp4_norm_linear));
  library.impl("nvfp4_norm_mlp", TORCH_BOX(&nibble::nvfp4_norm_mlp));
  library.impl("nvfp4_between_attentions", TORCH_BOX(&nibble::nvfp4_between_attentions));
}
