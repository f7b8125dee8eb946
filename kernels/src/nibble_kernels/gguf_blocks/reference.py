"""nibble::gguf_… in plain torch: the specification. Layouts: llama.cpp, ggml-common.h."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.weight_quant import reference as weight_quant

# (elements, bytes) of a block.
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "BF16": (1, 2),
    "F16": (1, 2),
    "F32": (1, 4),
}
_NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def to_bfloat16(blocks: Tensor, kind: str) -> Tensor:
    """The operator."""
    if kind in _NUMBERS:
        return blocks.reshape(-1).view(_NUMBERS[kind]).bfloat16()
    rows = blocks.reshape(-1, BLOCKS[kind][1])
    make = _k_quant if kind in ("Q4_K", "Q5_K") else _q6_k if kind == "Q6_K" else _of_32
    return make(rows, kind).reshape(-1).bfloat16()


def largest_magnitude(blocks: Tensor, kind: str) -> Tensor:
    """Of the values in bfloat16, float32 []."""
    return weight_quant.largest_magnitude(to_bfloat16(blocks, kind))


def to_nvfp4(
    blocks: Tensor,
    kind: str,
    heads: int,
    amax: Tensor,
    global_scale: Tensor,
    four_over_six: bool,
    packed: Tensor,
    scales: Tensor,
) -> None:
    """The operator."""
    weight = to_bfloat16(blocks, kind).view(packed.shape[0], 2 * packed.shape[1])
    if heads:
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    found = weight_quant.quantize_weight(weight, amax, global_scale, four_over_six)
    packed.copy_(found[0])
    scales.view(torch.uint8).copy_(found[1].view(torch.uint8))


def _half(rows: Tensor, at: int) -> Tensor:
    """A float16 of each block, float32 [N, 1]."""
    return rows[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """[N, bytes] to [N, 2 · bytes]: all low nibbles, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _of_32(rows: Tensor, kind: str) -> Tensor:
    """[scale, minimum?, fifth bits?, codes]: scale · code + minimum, or codes around zero."""
    scale, at = _half(rows, 0), 2
    if kind == "Q8_0":
        return rows[:, 2:].contiguous().view(torch.int8).float() * scale
    minimum = None
    if kind.endswith("_1"):
        minimum, at = _half(rows, 2), 4
    codes = _nibbles(rows[:, -16:]).int()
    if kind.startswith("Q5"):
        bits = rows[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes |= bits.flatten(1).int() << 4
    if minimum is None:
        return scale * (codes - (16 if kind.startswith("Q5") else 8)).float()
    return scale * codes.float() + minimum


def _k_quant(rows: Tensor, kind: str) -> Tensor:
    """[scale, scale of minima, 12 bytes of eight 6-bit scales and minima, fifth bits?, codes]."""
    low, middle, high = rows[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), dim=1).float()
    minima = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), dim=1).float()
    codes = _nibbles(rows[:, -128:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)
    if kind == "Q5_K":
        place = torch.arange(8, dtype=torch.uint8)[:, None]
        codes = codes | (rows[:, None, 16:48] >> place & 1) << 4
    scale, minimum = _half(rows, 0) * scales, _half(rows, 2) * minima
    return scale[..., None] * codes.float() - minimum[..., None]


def _q6_k(rows: Tensor, _kind: str) -> Tensor:
    """[low nibbles, upper two bits, sixteen 8-bit scales, scale]."""
    low = _nibbles(rows[:, :128].unflatten(1, (2, 64))).unflatten(2, (4, 32))
    place = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = rows[:, 128:192].reshape(-1, 2, 1, 32) >> place & 3
    codes = (low | high << 4).to(torch.int8) - 32
    scale = _half(rows, 208) * rows[:, 192:208].contiguous().view(torch.int8).float()
    return scale[..., None] * codes.reshape(-1, 16, 16).float()
