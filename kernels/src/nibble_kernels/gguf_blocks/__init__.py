"""nibble::gguf_to_bfloat16: blocks of llama.cpp's quantized types as bfloat16.

Each value is computed in float32, as the library gguf computes it, and rounded once. That library
uses numpy, which makes a temporary array of every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.gguf_blocks import reference
from nibble_kernels.library import operator

__all__ = ["BLOCKS", "gguf_to_bfloat16"]

# (elements, bytes) of a block, by the type's name in GGUF.
BLOCKS = reference.BLOCKS

_to_bfloat16 = operator(
    "gguf_to_bfloat16(Tensor blocks, str kind) -> Tensor",
    reference.to_bfloat16,
    lambda blocks, kind: blocks.new_empty(
        blocks.numel() // BLOCKS[kind][1] * BLOCKS[kind][0], dtype=torch.bfloat16
    ),
)


def gguf_to_bfloat16(blocks: Tensor, kind: str) -> Tensor:
    """The values, bfloat16 [elements], of whole blocks, uint8, of a type in BLOCKS. Raises
    ValueError.
    """
    if kind not in BLOCKS:
        raise ValueError(f"blocks of {kind}; expected one of {', '.join(BLOCKS)}")
    if blocks.dtype != torch.uint8 or blocks.numel() % BLOCKS[kind][1]:
        raise ValueError(
            f"blocks are {blocks.numel()} of {blocks.dtype}; expected bytes, a multiple of"
            f" {BLOCKS[kind][1]}"
        )
    return _to_bfloat16(blocks, kind)
