// The operators that nvfp4_weight_linear chooses among, as functions.
#pragma once

#include <optional>
#include <vector>

#include "nibble/tensors.h"

namespace nibble {

namespace decode {
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
}

}  // namespace nibble
