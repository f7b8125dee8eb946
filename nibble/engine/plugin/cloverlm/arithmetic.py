"""Float32 arithmetic that CloverLM needs and vLLM lacks: rotation, normalization to the sphere, and
the norm after a sublayer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SPHERE_EPS = 1e-12


class Rotary(nn.Module):
    """Interleaved rotary embedding in float32: rotates elements 2j and 2j+1 of a head by
    position * base^(-2j/d).

    vLLM's RotaryEmbedding rounds its table to the model's dtype (vllm 0.32
    rotary_embedding/base.py:61).
    """

    table: Tensor

    def __init__(self, head_dim: int, base: float, positions: int) -> None:
        super().__init__()
        rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
        table = torch.stack((angles.cos(), angles.sin()), dim=-1).float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """x, float32 [tokens, heads, d], rotated. positions: [tokens]."""
        cosine, sine = self.table[positions][:, None].unbind(-1)
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack(
            (even * cosine - odd * sine, odd * cosine + even * sine), dim=-1
        ).flatten(-2)


def to_sphere(x: Tensor) -> Tensor:
    """x divided by its length along the last dimension, like torch.nn.functional.normalize."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=SPHERE_EPS)


class RmsNorm(nn.Module):
    """RMSNorm with a float32 result, so that only the addition to the residual rounds it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
