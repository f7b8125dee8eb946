"""The specification of nibble::route_experts and norm_route_experts, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual times weight + offset, in float32, and the sum; each rounded once."""
    total = x.float() + residual.float()
    factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    normed = total * factor * (weight.float() + offset)
    return normed.to(x.dtype), total.to(x.dtype)


def logits_of(x: Tensor, gate: Tensor, round_logits: bool) -> Tensor:
    """x times the gate, in float32; rounded to x's dtype first, as a linear layer does."""
    logits = x.float() @ gate.float().T
    return logits.to(x.dtype).float() if round_logits else logits


def shared_factors_of(x: Tensor, gate: Tensor) -> Tensor:
    """[T, 1]: sigmoid of x times a shared expert's gate [H], rounded as a linear layer and sigmoid
    in x's dtype are.
    """
    logits = (x.float() @ gate.float().reshape(-1, 1)).to(x.dtype)
    return logits.float().sigmoid().to(x.dtype)


def choose_experts(
    logits: Tensor,
    topk: int,
    sigmoid: bool,
    renormalize: bool,
    bias: Tensor | None,
    scale: float,
    padding: Tensor | None,
) -> Tensor:
    """[2, T, k] float32: weights, and int32 ids as bits.

    The experts of the highest scores plus bias, the highest first; of equal ones the lower number.
    Weights are scores without bias. Tokens in `padding` get ids -1 and weights 0.
    """
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    by = scores if bias is None else scores + bias
    ids = by.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, ids)
    if renormalize:
        sums = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(sums > 0, sums, 1.0)
    weights = weights * scale
    if padding is not None:
        is_padding = padding[: len(logits), None]
        weights, ids = weights.masked_fill(is_padding, 0.0), ids.masked_fill(is_padding, -1)
    return torch.stack((weights, ids.int().view(torch.float32)))
