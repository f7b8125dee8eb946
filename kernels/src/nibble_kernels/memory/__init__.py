"""nibble::read_memory: how fast memory is read, which limits products with few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.library import operator

__all__ = ["read_memory"]

_read_memory = operator(
    "read_memory(Tensor x) -> Tensor",
    lambda x: x.view(torch.int64).sum(),
    lambda x: x.new_empty((), dtype=torch.int64),
)


def read_memory(x: Tensor) -> int:
    """The sum of the 64-bit words of x (contiguous uint8, a multiple of 8 bytes), modulo 2^64 as a
    signed number; each thread of torch's reads a part of it.
    """
    return int(_read_memory(x))
