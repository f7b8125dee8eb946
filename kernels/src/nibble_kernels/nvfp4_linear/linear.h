// The operators that nvfp4_weight_linear chooses among, as functions.
#pragma once

#include <optional>
#include <vector>

#include "nibble/tensors.h"
#include "nvfp4_linear/norm_beside.h"

namespace nibble {

// A weight of prepare_weight, and what follows its sums.
struct Weight {
  const Tensor &codes, &scales;
  int64_t outputs;
  bool native;
  double global_scale;
  const std::optional<Tensor>&column_scale, &bias;
};

// An RMSNorm's result without the factors of its rows: what it normalizes times its weight, and sums of squares, [at
// least `parts`, tokens of a tile].
struct Unscaled {
  Tensor x, squares;
  int64_t parts;
};
NormBefore norm_before(const Unscaled& x, double epsilon);
NormAfter norm_after(const Unscaled& to, const Tensor& norm_weight);
// Of a norm of the result `out` of a product with this weight.
void require_norm(const Tensor& norm_weight, const Weight& weight, const Tensor& out);

namespace decode {
constexpr int64_t kMostNormRows = 8;  // of a product with a norm before or after it

// nvfp4_decode_linear of x [rows, columns] with a residual, whose result `out` an RMSNorm with this weight normalizes
// next.
Unscaled multiply_before_norm(const Tensor& x, const Weight& weight, const Tensor& residual,
                              const Tensor& norm_weight, const Tensor& out);
// nvfp4_decode_linear of that norm's result.
void multiply_after_norm(const Unscaled& x, double epsilon, const Weight& weight, bool silu_mul, const Tensor& out);

Tensor nvfp4_decode_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                           bool native, double global_scale, const std::optional<Tensor>& column_scale,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                           bool silu_mul, bool batch_invariant, const std::vector<int64_t>& division);
}

namespace warpgroup {
Tensor nvfp4_warpgroup_linear(const Tensor& input, const Tensor& codes, const Tensor& scales, int64_t outputs,
                              bool native, double global_scale, const std::optional<Tensor>& column_scale,
                              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                              bool silu_mul, const std::vector<int64_t>& division);

// Of a product of so many tokens whose x comes in order (warpgroup_form.h): tokens of a tile.
uint32_t ordered_tile(int64_t tokens);
// Memory for an x in order: [whole tiles of tokens, columns], columns in whole chunks of 128.
Tensor ordered_like(const Tensor& like, int64_t tokens, int64_t columns);
// nvfp4_warpgroup_linear of an x in order. ordered_result: `out` is the x of a next product, in order.
void multiply_ordered(const Tensor& x, int64_t tokens, const Weight& weight, const std::optional<Tensor>& residual,
                      bool silu_mul, bool ordered_result, const Tensor& out);

// The same as decode's, up to kMostNormTokens tokens, with what is scaled in order. is_ordered: x is in order, too.
Unscaled multiply_before_norm(const Tensor& x, bool is_ordered, int64_t tokens, const Weight& weight,
                              const Tensor& residual, const Tensor& norm_weight, const Tensor& out);
// nvfp4_warpgroup_linear of that norm's result.
void multiply_after_norm(const Unscaled& x, double epsilon, int64_t tokens, const Weight& weight, bool silu_mul,
                         bool ordered_result, const Tensor& out);
}  // namespace warpgroup

// Whether the warpgroup kernel multiplies so many rows by a weight, above so many.
bool takes_warpgroup(int device, int64_t above, int64_t rows, int64_t outputs, int64_t columns);

Tensor nvfp4_weight_linear(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t outputs,
                           bool native, double global_scale, const std::optional<Tensor>& column_scale,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                           bool silu_mul, bool batch_invariant);

}  // namespace nibble
