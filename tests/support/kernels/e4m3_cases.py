"""E4M3 experts for tests: every code and each kind of scale, with their values in float64."""

from __future__ import annotations

import torch
from torch import Tensor

SCALES = ("tensor", "channel", "block")


def e4m3_experts(
    experts: int, rows: int, columns: int, scales: str, parts: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, tuple[int, int] | None]:
    """Weights float8_e4m3fn [E, N, K], their scales as a checkpoint has them, and the blocks."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, columns), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    weight = codes.view(torch.float8_e4m3fn)
    if scales == "block":
        shape: tuple[int, ...] = (experts, parts * -(-rows // parts // 128), -(-columns // 128))
    else:
        shape = (experts, rows, 1) if scales == "channel" else (experts, parts)
    # Far apart, as float32 and not as powers of two.
    spread = torch.rand(shape, generator=generator) * 12 - 16
    return weight, 2.0**spread, (128, 128) if scales == "block" else None


def e4m3_values(weight: Tensor, scale: Tensor, parts: int = 1) -> Tensor:
    """[E, N, K] in float64, without the package's code."""
    experts, rows, columns = weight.shape
    factors = torch.empty(experts, rows, columns, dtype=torch.float64)
    each = rows // parts
    for row in range(rows):
        part, place = divmod(row, each)
        if scale.shape == (experts, parts):
            factors[:, row] = scale[:, part, None]
        elif scale.shape == (experts, rows, 1):
            factors[:, row] = scale[:, row]
        else:
            line = scale[:, part * -(-each // 128) + place // 128]
            factors[:, row] = line.repeat_interleave(128, 1)[:, :columns]
    return weight.double() * factors


def e4m3_matrix(
    rows: int, columns: int, scales: str, seed: int = 0
) -> tuple[Tensor, Tensor, tuple[int, int] | None]:
    """A weight of a linear layer, float8_e4m3fn [N, K], its scales and blocks."""
    weight, scale, block = e4m3_experts(1, rows, columns, scales, seed=seed)
    return weight[0], scale[0], block


def matrix_values(weight: Tensor, scale: Tensor) -> Tensor:
    """[N, K] in float64, without the package's code."""
    return e4m3_values(weight[None], scale[None])[0]
