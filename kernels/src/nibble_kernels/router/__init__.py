"""nibble::route_experts and norm_route_experts: a router of experts, for a few tokens in one
launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.library import operator
from nibble_kernels.router.reference import (
    add_and_norm,
    choose_experts,
    logits_of,
    shared_factors_of,
)

__all__ = [
    "APART",
    "MAX_CHOSEN",
    "MAX_COLUMNS",
    "MAX_EXPERTS",
    "MAX_TOKENS_AT_ONCE",
    "norm_route_experts",
    "route_experts",
    "weights_and_ids",
]

# Of problem.h.
MAX_EXPERTS, MAX_CHOSEN, MAX_COLUMNS, CHUNK = 512, 32, 4096, 32
MAX_TOKENS_AT_ONCE = 64
APART = (-1, 0)  # a division: norm, product and choice in separate launches


def _route(
    x: Tensor,
    gate: Tensor,
    topk: int,
    sigmoid: bool,
    renormalize: bool,
    bias: Tensor | None,
    scale: float,
    round_logits: bool,
    padding: Tensor | None,
    *division: int,
) -> Tensor:
    logits = logits_of(x, gate, round_logits)
    return choose_experts(logits, topk, sigmoid, renormalize, bias, scale, padding)


def _norm_route(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    norm_offset: float,
    shared_gate: Tensor | None,
    gate: Tensor,
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, total = add_and_norm(x, residual, norm, epsilon, norm_offset)
    factors = _empty_factors(x, None)
    if shared_gate is not None:
        factors = shared_factors_of(normed, shared_gate)
    return normed, total, _route(normed, gate, *options), factors  # type: ignore[arg-type]


def _empty_choices(x: Tensor, topk: int) -> Tensor:
    return x.new_empty((2, x.shape[0], topk), dtype=torch.float32)


def _empty_factors(x: Tensor, shared_gate: Tensor | None) -> Tensor:
    return x.new_empty((0 if shared_gate is None else x.shape[0], 1))


_OPTIONS = (
    "Tensor gate, int topk, bool sigmoid, bool renormalize, Tensor? bias, float scale,"
    " bool round_logits, Tensor? padding, int groups, int ranks"
)
_route_experts = operator(
    f"route_experts(Tensor x, {_OPTIONS}) -> Tensor",
    _route,
    lambda x, gate, topk, *rest: _empty_choices(x, topk),
)
_norm_route_experts = operator(
    "norm_route_experts(Tensor x, Tensor residual, Tensor norm, float epsilon, float norm_offset,"
    f" Tensor? shared_gate, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_route,
    lambda x, residual, norm, epsilon, norm_offset, shared_gate, gate, topk, *rest: (
        torch.empty_like(x),
        torch.empty_like(x),
        _empty_choices(x, topk),
        _empty_factors(x, shared_gate),
    ),
)


def route_experts(
    x: Tensor,
    gate: Tensor,
    topk: int,
    *,
    sigmoid: bool = False,
    renormalize: bool = True,
    bias: Tensor | None = None,
    scale: float = 1.0,
    round_logits: bool = True,
    padding: Tensor | None = None,
    division: tuple[int, int] = (0, 0),
) -> Tensor:
    """Each token's experts: [2, T, k] float32, which `weights_and_ids` takes apart.

    x: bfloat16 [T, H], gate: bfloat16 [E, H]; bias: float32 [E], for the choice alone; padding:
    bool [T], tokens that get no experts. Scores are softmax of the logits, or sigmoid. On a GPU H
    is a multiple of 32 up to MAX_COLUMNS and E up to MAX_EXPERTS. Up to MAX_TOKENS_AT_ONCE tokens
    are one launch, where a token's bits depend on nothing but its row; more take torch's product.
    division: groups of 8 tokens in a thread block and blocks in a cluster, or APART, for tests and
    measurements.
    """
    return _route_experts(
        x, gate, topk, sigmoid, renormalize, bias, scale, round_logits, padding, *division
    )


def norm_route_experts(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    gate: Tensor,
    topk: int,
    *,
    norm_offset: float = 0.0,
    shared_gate: Tensor | None = None,
    sigmoid: bool = False,
    renormalize: bool = True,
    bias: Tensor | None = None,
    scale: float = 1.0,
    round_logits: bool = True,
    padding: Tensor | None = None,
    division: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, route_experts(y), factors) where y is RMSNorm of x + residual, times norm +
    norm_offset, in float32 and rounded once. y and the sum have the same bits for any number of
    tokens.

    factors: [T, 1], sigmoid of y times shared_gate [H] or [1, H], a shared expert's gate; [0, 1]
    without it. One launch also needs a gate of at most 2^20 weights.
    """
    return _norm_route_experts(
        x, residual, norm, epsilon, norm_offset, shared_gate, gate, topk, sigmoid, renormalize,
        bias, scale, round_logits, padding, *division,
    )  # fmt: skip


def weights_and_ids(choices: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [T, k] and int32 [T, k], without a copy."""
    return choices[0], choices[1].view(torch.int32)
