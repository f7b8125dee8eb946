"""nibble::quartet2_quant and nvfp4_dequantize: Quartet II's quantization of activations, with one
scale per batch or per token.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nibble_kernels.activation_quant import empty_outputs
from nibble_kernels.library import operator
from nibble_kernels.quartet2 import reference
from nibble_kernels.scale_layout import BLOCK

__all__ = ["MODES", "Mode", "nvfp4_dequantize", "quartet2_quant"]

Mode = Literal["token", "batch-pow2", "batch"]
MODES: tuple[Mode, ...] = get_args(Mode)

_quartet2_quant = operator(
    "quartet2_quant(Tensor x, Tensor? amax, str mode, bool tiled) -> (Tensor, Tensor, Tensor)",
    reference.quartet2_quant,
    lambda x, amax, mode, tiled: (
        *empty_outputs(x, x.shape[-1], tiled),
        x.new_empty((x.shape[0], 1) if mode == "token" else (), dtype=torch.float32),
    ),
)
_nvfp4_dequantize = operator(
    "nvfp4_dequantize(Tensor codes, Tensor scales, Tensor g, ScalarType dtype) -> Tensor",
    reference.nvfp4_dequantize,
    lambda codes, scales, g, dtype: codes.new_empty(
        (codes.shape[0], codes.shape[1] * 2), dtype=dtype
    ),
)


def quartet2_quant(
    x: Tensor, mode: Mode, amax: Tensor | None = None, *, tiled: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, uint8 [M, K/2], block scales and the scale G, float32, of x [M, K], with x about
    code * scale * G.

    G is [M, 1] in mode "token" and else []. amax: float32 of G's shape, replaces the largest
    magnitude of x, for example with that of all ranks or of the rows without padding. Layout of
    codes and scales: as in activation_quant. Raises ValueError for another mode or shape.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: expected {', '.join(MODES)}")
    if x.dim() != 2 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"x must be [M, K] with K a multiple of {BLOCK}; got shape {tuple(x.shape)}"
        )
    return _quartet2_quant(x, amax, mode, tiled)


def nvfp4_dequantize(codes: Tensor, scales: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, [M, K] in `dtype`, of codes [M, K/2] with row-major scales [M, K/16] and G,
    float32 [] or [M, 1].

    Exact in bfloat16 and float16 if G is a power of two and all values are in the dtype's range.
    """
    return _nvfp4_dequantize(codes, scales, g, dtype)
