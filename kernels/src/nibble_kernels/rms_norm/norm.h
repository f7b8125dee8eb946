// RMSNorm for the operators that multiply by its result.
#pragma once

#include "nibble/tensors.h"

namespace nibble::norm {

// rms_norm of x [..., K] into `to`, in the order of nvfp4_linear/warpgroup_form.h, for tiles of so many tokens.
// K must be a multiple of 128. Rows past the last are not written.
void rms_norm_in_order(const Tensor& x, const Tensor& weight, double epsilon, uint32_t tile, void* to);

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon);

}  // namespace nibble::norm
