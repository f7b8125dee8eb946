"""A linear layer of E4M3 numbers, in plain torch float32: the specification.

Per tensor, token and channel: y = Σ_k x[k] · w[n, k] · x_scale · weight_scale[n] + bias[n].
Blockwise: y = Σ_b (Σ_{k in b} x[k] · w[n, k]) · (x_scale[b] · weight_scale[n / 128, b]) + bias[n],
b having 128 columns. Rounded once. Only the order of the sums is not specified.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    blockwise: bool,
    half: bool,
) -> Tensor:
    """The operator nibble::fp8_linear."""
    rows, (outputs, columns) = x.reshape(-1, x.shape[-1]).float(), weight.shape
    _check_scales(x_scale, weight_scale, len(rows), outputs, -(-columns // BLOCK), blockwise)
    if blockwise:
        of_x = x_scale.reshape(len(rows), -1).repeat_interleave(BLOCK, 1)[:, :columns]
        of_weight = weight_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        y = (rows * of_x) @ (weight.float() * of_weight[:outputs, :columns]).T
    else:
        y = rows @ weight.float().T * x_scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    if bias is not None:
        y = y + bias.float()
    return y.to(torch.float16 if half else torch.bfloat16).reshape(*x.shape[:-1], outputs)


def _check_scales(
    x_scale: Tensor, weight_scale: Tensor, tokens: int, outputs: int, blocks: int, blockwise: bool
) -> None:
    """The kernel reads as many scales as these; another layout would be read as other scales."""
    if blockwise:
        counts = ({tokens * blocks}, {-(-outputs // BLOCK) * blocks})
        expected = "a scale for each 128 columns of a token and for each 128 by 128 of the weight"
    else:
        counts = ({1, tokens}, {1, outputs})
        expected = "one scale, or one for each token and each row of the weight"
    found = (x_scale.numel(), weight_scale.numel())
    if found[0] not in counts[0] or found[1] not in counts[1]:
        raise ValueError(f"expected {expected}; got {found[0]} and {found[1]}")
