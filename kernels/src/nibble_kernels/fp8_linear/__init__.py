"""nibble::fp8_linear: few rows of E4M3 activations times an E4M3 weight, on NVIDIA GPUs.

Made for SM12x; it runs on every GPU from SM89: docs/kernels/blackwell.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.fp8_linear.reference import fp8_linear as _reference
from nibble_kernels.library import operator

__all__ = ["fp8_linear"]

_operator = operator(
    "fp8_linear(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, bool"
    " blockwise, bool half) -> Tensor",
    _reference,
    lambda x, weight, x_scale, weight_scale, bias, blockwise, half: x.new_empty(
        (*x.shape[:-1], len(weight)), dtype=torch.float16 if half else torch.bfloat16
    ),
)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    blockwise: bool = False,
) -> Tensor:
    """x, float8_e4m3fn [..., K], times the transposed weight [N, K]: [..., N] of `dtype`.

    Scales are float32: one, or one for each row of x and each row of the weight. blockwise: x_scale
    [..., K/128] and weight_scale [N/128, K/128], rounded up. K must be a multiple of 16. A row's
    result does not depend on the other rows. Made for up to 64 rows: 32 at a time read the weight.
    Raises ValueError.
    """
    if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"expected float8_e4m3fn; got {x.dtype} and {weight.dtype}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"expected bfloat16 or float16; got {dtype}")
    if weight.shape[1] % 16:
        raise ValueError(f"rows must have a multiple of 16 columns; got {weight.shape[1]}")
    half = dtype == torch.float16
    return _operator(x, weight, x_scale, weight_scale, bias, blockwise, half)
