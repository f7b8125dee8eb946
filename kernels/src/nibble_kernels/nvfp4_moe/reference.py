"""Experts with NVFP4 weights, in plain torch float32: the specification.

For each token and each of its experts e, with w the router's weight:

    gate, up = x · w13[e]ᵀ · w13_global_scale[e, gate or up]
    h = function(gate) · up, rounded to x's dtype
    y = h · w2[e]ᵀ · w2_global_scale[e]
    output of the token += w · y

The output is rounded to x's dtype at the end. All other arithmetic is in float32, and the order of
sums is not specified. With input scales, nvfp4_quant first rounds x and h to NVFP4 with the scale
of the expert. A negative expert id is an expert of another process and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nibble_kernels import exact
from nibble_kernels.nvfp4_linear.reference import matmul, round_to_nvfp4


def activate(
    h: Tensor,
    function: str,
    gated: bool,
    interleaved: bool,
    limit: float,
    alpha: float,
    beta: float,
) -> Tensor:
    """function(gate) · (up + beta) of h [..., 2I] in float32, or function(h) of h [..., I].

    function: "silu" (x · sigmoid(alpha · x)), "gelu", "gelu_tanh", "relu2" or "swiglustep".
    interleaved: gate and up are alternate columns, else halves. Clamps gate to at most limit and up
    to ±limit first; "swiglustep" clamps silu(gate) instead of gate.
    """
    if not gated:
        return apply(h, function, alpha)
    gate, up = (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)
    up = up.clamp(-limit, limit) + beta
    if function == "swiglustep":
        return exact.silu(gate).clamp(max=limit) * up
    return apply(gate.clamp(max=limit), function, alpha) * up


def apply(x: Tensor, function: str, alpha: float) -> Tensor:
    """The activation function of x, without gate, up and limits."""
    if function == "silu":
        return x / (1 + exact.exp(-(alpha * x)))
    if function == "relu2":
        return x.relu().square()
    return torch.nn.functional.gelu(x, approximate="tanh" if function == "gelu_tanh" else "none")


def rounded_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: int,
    columns: int,
    product: Callable[[Tensor, int, bool], Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The specification of the GPU's kernels for a whole layer, [T, columns]. The intermediate,
    each product and the sum are rounded once.

    product(rows, expert, is_first): float32 rows times w13 or w2 of one expert.
    """
    ids, topk = topk_ids.reshape(-1), topk_ids.shape[1]
    y = torch.zeros(len(ids), columns, dtype=torch.float32, device=x.device)
    for expert in ids[(ids >= 0) & (ids < experts)].unique().tolist():
        pairs = (ids == expert).nonzero()[:, 0]
        h = activation(product(x[pairs // topk], expert, True)).to(x.dtype)
        y[pairs] = product(h, expert, False) * topk_weights.reshape(-1)[pairs, None]
    return y.to(x.dtype).float().unflatten(0, (-1, topk)).sum(1).to(x.dtype)


def nvfp4_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_global_scale: Tensor,
    w13_input_scale: Tensor | None,
    w2_input_scale: Tensor | None,
    weight_on_input: bool,
    function: str,
    gated: bool,
    interleaved: bool,
    limit: float,
    alpha: float,
    beta: float,
) -> Tensor:
    """The operator nibble::nvfp4_moe."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        rows, weights = x[token].float(), topk_weights[token, place][:, None].float()
        if weight_on_input:
            rows, weights = (rows * weights).to(x.dtype).float(), torch.ones_like(weights)
        scales = w13_global_scale[expert]
        factors = (
            scales.repeat(w13.shape[1] // 2)
            if interleaved
            else scales.repeat_interleave(w13.shape[1] // len(scales))
        )
        h = _multiply(rows, w13[expert], w13_scale[expert], factors, w13_input_scale, expert)
        h = activate(h, function, gated, interleaved, limit, alpha, beta).to(x.dtype).float()
        y = _multiply(
            h, w2[expert], w2_scale[expert], w2_global_scale[expert], w2_input_scale, expert
        )
        out.index_add_(0, token, y * weights)
    return out.to(x.dtype)


def _multiply(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    factors: Tensor,
    input_scale: Tensor | None,
    expert: int,
) -> Tensor:
    if input_scale is None:
        return matmul(x, weight, scales) * factors
    inverse = 1 / input_scale[expert]
    return matmul(round_to_nvfp4(x, inverse), weight, scales) * (factors * (1 / inverse))
