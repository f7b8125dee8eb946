"""NVFP4 in plain PyTorch: tensors as a checkpoint stores them, and what they
stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Errors of a weight in the Frobenius norm. NVFP4's own error on normal weights is 0.095; rounding
# block scales to E4M3 once more adds at most 1/17 a block. What loses a scale's
# size is off by 0.4 and more.
SOUND_ERROR = 0.06


@dataclass(frozen=True)
class Packed:
    """One NVFP4 weight: codes [N, K/2], block scales [N, K/16] in E4M3, and the scale of the
    whole tensor.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scale_2: float

    @property
    def values(self) -> torch.Tensor:
        """What the checkpoint means, float32 [N, K]."""
        return dequantize(self.codes, self.scales, self.scale_2)


def normal_weights(*sizes: tuple[int, float], columns: int = 256) -> list[torch.Tensor]:
    """Weights [rows, columns] of normal distribution, one for each (rows, standard deviation)."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(rows, columns, generator=generator) * deviation for rows, deviation in sizes
    ]


def quantize(weight: torch.Tensor) -> Packed:
    """As ModelOpt does: the tensor's scale is amax / (6 * 448), a block's is its own amax / (6 *
    scale).
    """
    import torch

    scale_2 = weight.abs().max().item() / (6 * 448)
    blocks = weight.float().reshape(weight.shape[0], -1, GROUP)
    scales = (blocks.abs().amax(-1) / (6 * scale_2)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = blocks / (scales.float() * scale_2).unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), torch.tensor(E2M1_BOUNDS)) + 8 * (scaled < 0)
    codes = codes.reshape(weight.shape).to(torch.uint8)
    return Packed(codes[:, ::2] | codes[:, 1::2] << 4, scales, scale_2)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, scale_2: float | torch.Tensor
) -> torch.Tensor:
    """Codes times block scale times the scale of the whole, float32."""
    import torch

    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = torch.tensor(E2M1)[(nibbles & 7).long()] * torch.where(nibbles > 7, -1.0, 1.0)
    blocks = values.unflatten(-1, (-1, GROUP)) * scales.float().unsqueeze(-1)
    return blocks.flatten(-2) * scale_2


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over the norm of what is expected."""
    return ((actual.float() - expected).norm() / expected.norm()).item()


def shard_errors(fused: torch.Tensor, shards: Sequence[Packed]) -> list[float]:
    """The relative error of each shard's rows in a fused weight, against the shard's own values."""
    rows = fused.split([shard.codes.shape[0] for shard in shards])
    return [relative_error(part, shard.values) for part, shard in zip(rows, shards, strict=True)]
