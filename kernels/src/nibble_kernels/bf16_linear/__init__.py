"""nibble::bf16_linear: a few rows of bfloat16 times a large bfloat16 weight, such as a head.

On the CPU, compiled, it reads the weight once for up to 8 rows, as checkpoints store it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.library import operator

__all__ = ["bf16_linear"]


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)


_bf16_linear = operator(
    "bf16_linear(Tensor x, Tensor weight) -> Tensor",
    _reference,
    lambda x, weight: x.new_empty((*x.shape[:-1], len(weight))),
)


def bf16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times the transposed weight [N, K]: bfloat16 [..., N], summed in float32.

    A row's result does not depend on the other rows. Raises RuntimeError for other dtypes or
    shapes.
    """
    return _bf16_linear(x, weight)
