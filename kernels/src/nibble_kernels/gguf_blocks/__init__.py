"""Blocks of llama.cpp's types as bfloat16 and as NVFP4.

Each value is computed in float32, as the library gguf computes it, and rounded once, to bfloat16.
That library uses numpy, which makes a temporary array of every step. NVFP4 is made row by row:
what is between is in the cache of a core, and the caller gives the memory of the result, because
Linux takes longer to clear new pages than the operator to compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.gguf_blocks import reference
from nibble_kernels.library import operator
from nibble_kernels.weight_quant import global_scale_of

__all__ = ["BLOCKS", "gguf_largest_magnitude", "gguf_to_bfloat16", "gguf_to_nvfp4"]

# (elements, bytes) of a block, by the type's name in GGUF.
BLOCKS = reference.BLOCKS

_to_bfloat16 = operator(
    "gguf_to_bfloat16(Tensor blocks, str kind) -> Tensor",
    reference.to_bfloat16,
    lambda blocks, kind: blocks.new_empty(
        blocks.numel() // BLOCKS[kind][1] * BLOCKS[kind][0], dtype=torch.bfloat16
    ),
)
_largest_magnitude = operator(
    "gguf_largest_magnitude(Tensor blocks, str kind) -> Tensor",
    reference.largest_magnitude,
    lambda blocks, kind: blocks.new_empty((), dtype=torch.float32),
)
_to_nvfp4 = operator(
    "gguf_to_nvfp4(Tensor blocks, str kind, int heads, Tensor amax, Tensor global_scale,"
    " bool four_over_six, Tensor(a!) packed, Tensor(b!) scales) -> ()",
    reference.to_nvfp4,
    lambda *_: None,
)


def gguf_to_bfloat16(blocks: Tensor, kind: str) -> Tensor:
    """The values, bfloat16 [elements], of whole blocks, uint8, of a type in BLOCKS. Raises
    ValueError.
    """
    _check(blocks, kind)
    return _to_bfloat16(blocks, kind)


def gguf_largest_magnitude(blocks: Tensor, kind: str) -> Tensor:
    """The largest magnitude of the values in bfloat16, float32 []. NaN where they hold one; 0 for
    no blocks. Raises ValueError.
    """
    _check(blocks, kind)
    return _largest_magnitude(blocks, kind)


def gguf_to_nvfp4(
    blocks: Tensor,
    kind: str,
    amax: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    four_over_six: bool = False,
    interleaved_heads: int = 0,
) -> Tensor:
    """Write the values as NVFP4 to `packed`, uint8 [N, K/2], and `scales`, float8_e4m3fn [N, K/16];
    return the global scale. The result is that of weight_quant.quantize of the values in bfloat16.

    amax: float32 [], the largest magnitude of all weights that share the scale. interleaved_heads:
    the rows are those of so many heads, with the two of a RoPE pair side by side; the result has
    all first ones of a head, then the others. The caller has made sure that amax is finite. Raises
    ValueError, and RuntimeError for sizes that differ.
    """
    _check(blocks, kind)
    scale = global_scale_of(amax, four_over_six)
    _to_nvfp4(blocks, kind, interleaved_heads, amax, scale, four_over_six, packed, scales)
    return scale


def _check(blocks: Tensor, kind: str) -> None:
    if kind not in BLOCKS:
        raise ValueError(f"blocks of {kind}; expected one of {', '.join(BLOCKS)}")
    if blocks.dtype != torch.uint8 or blocks.numel() % BLOCKS[kind][1]:
        raise ValueError(
            f"blocks are {blocks.numel()} of {blocks.dtype}; expected bytes, a multiple of"
            f" {BLOCKS[kind][1]}"
        )
