"""nibble::quant_fp4: Quartet II's forward quantizer, with round to nearest or four-over-six."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.activation_quant import empty_outputs
from nibble_kernels.library import operator
from nibble_kernels.quartet2.quantize import reference
from nibble_kernels.scale_layout import BLOCK

__all__ = ["quant_fp4"]

_quant_fp4 = operator(
    "quant_fp4(Tensor x, Tensor? amax, bool four_over_six, float scale_override, bool tiled, bool"
    " exact) -> (Tensor, Tensor, Tensor)",
    reference.quant_fp4,
    lambda x, amax, four_over_six, scale_override, tiled, exact: (
        *empty_outputs(x, x.shape[-1], tiled),
        x.new_empty((), dtype=torch.float32),
    ),
)


def quant_fp4(
    x: Tensor,
    amax: Tensor | None = None,
    *,
    four_over_six: bool = False,
    scale_override: float = 1.0,
    tiled: bool = True,
    exact: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [..., K/2], block scales and the scale G, float32 [], of x [..., K], with x about
    code * scale * G. Raises ValueError.

    amax: the largest magnitude for G, one float32; default: that of x, which takes a second pass
    over x but no synchronization. four_over_six: also try each block with its largest element at 4,
    and keep the smaller error. tiled and exact: as in nvfp4_quant.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 has blocks of {BLOCK} columns; got shape {tuple(x.shape)}")
    return _quant_fp4(x, amax, four_over_six, scale_override, tiled, exact)
