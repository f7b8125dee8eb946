"""CloverLM's forward pass in float64: the specification, with which tests compare model.py.

X = E[id]
per block:  q, k, v = Wq X, Wk X, Wv X;  rotate q and k by position, then scale them to length 1;
            multiply q by its head's scale
            a = softmax over earlier positions of q_h · k_(h // ratio);  X = X + RMSNorm(Wo a v)
            X = X + RMSNorm(W2 relu(W1 X)^2)
logits = E RMSNorm(X)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# (name of the weight without ".weight", x) -> x times the transposed weight
Linear = Callable[[str, Tensor], Tensor]


def logits(
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    *,
    heads: int,
    head_dim: int,
    base: float = 1024.0,
    eps: float = 2.0**-23,
    linear: Linear | None = None,
) -> Tensor:
    """Logits, float64 [tokens, vocabulary], of one sequence of ids [tokens].

    tensors: by their names in the checkpoint; linear: replaces the six products of a block.
    """

    def weight(name: str) -> Tensor:
        return tensors[f"transformer.{name}"].double()

    def exact(name: str, x: Tensor) -> Tensor:
        return x @ weight(f"{name}.weight").T

    product = linear or exact
    x = weight("emb.weight")[ids]
    blocks = 1 + max(int(name.split(".")[2]) for name in tensors if ".blocks." in name)
    for block in range(blocks):
        path = f"blocks.{block}"
        q, k, v = (
            product(f"{path}.mhsa.{name}", x).unflatten(-1, (-1, head_dim))
            for name in ("lq", "lk", "lv")
        )
        q, k = (rotated(y, base) for y in (q, k))
        q, k = (y / y.norm(dim=-1, keepdim=True).clamp(min=1e-12) for y in (q, k))
        q = q * weight(f"{path}.mhsa.scale").reshape(heads, 1)
        k, v = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + rms_norm(product(f"{path}.mhsa.lo", y), weight(f"{path}.out_att_norm.weight"), eps)
        y = product(f"{path}.mlp.l1.0", x).relu().square()
        x = x + rms_norm(product(f"{path}.mlp.l2", y), weight(f"{path}.out_mlp_norm.weight"), eps)
    return rms_norm(x, weight("out_norm.weight"), eps) @ weight("emb.weight").T


def rotated(x: Tensor, base: float) -> Tensor:
    """x [tokens, heads, d] with its pairs (2j, 2j+1) rotated by position * base^(-2j/d)."""
    d = x.shape[-1]
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * base ** (
        -torch.arange(0, d, 2, dtype=torch.float64) / d
    )
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(
        -2
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x divided by the root of its mean square plus eps, times weight."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
