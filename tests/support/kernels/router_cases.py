"""Inputs of a router of experts, and what it must choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Case:
    """x [T, H] with a gate [E, H]; with a residual, the norm comes first."""

    x: Tensor
    gate: Tensor
    topk: int
    residual: Tensor | None = None
    norm: Tensor | None = None
    epsilon: float = 1e-6
    norm_offset: float = 0.0
    shared_gate: Tensor | None = None  # with a residual
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> Case:
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        moved["options"] = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return Case(**moved)

    def rows(self, part: slice) -> Case:
        """Some of the tokens alone."""
        options = dict(self.options)
        if options.get("padding") is not None:
            options["padding"] = options["padding"][part]
        residual = None if self.residual is None else self.residual[part]
        return Case(
            self.x[part],
            self.gate,
            self.topk,
            residual,
            self.norm,
            self.epsilon,
            self.norm_offset,
            self.shared_gate,
            options,
        )


def make_case(
    tokens: int,
    experts: int,
    columns: int,
    topk: int,
    *,
    with_norm: bool = False,
    with_shared_gate: bool = False,
    norm_offset: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    gate = (torch.randn(experts, columns, generator=generator) / columns**0.5).to(torch.bfloat16)
    residual = normal(tokens, columns) * 3 if with_norm else None
    norm = normal(columns) / 4 + 1 - norm_offset if with_norm else None
    x = normal(tokens, columns)
    shared = normal(1, columns) / 8 if with_shared_gate else None
    return Case(x, gate, topk, residual, norm, 1e-6, norm_offset, shared, options)


def run(case: Case, **division: Any) -> tuple[Tensor, ...]:
    """nibble's operator: weights, ids, with a norm its result and the sum, and with a shared gate
    its factors.
    """
    from nibble_kernels.router import norm_route_experts, route_experts, weights_and_ids

    options = case.options | division
    if case.residual is None:
        return weights_and_ids(route_experts(case.x, case.gate, case.topk, **options))
    assert case.norm is not None
    normed, total, choices, factors = norm_route_experts(
        case.x, case.residual, case.norm, case.epsilon, case.gate, case.topk,
        norm_offset=case.norm_offset, shared_gate=case.shared_gate, **options,
    )  # fmt: skip
    found = (*weights_and_ids(choices), normed, total)
    if case.shared_gate is not None:
        return *found, factors
    assert factors.shape == (0, 1)
    return found


def check(found: tuple[Tensor, ...], case: Case) -> None:
    """Against float64: logits from the x that the router multiplied, choices up to ties within
    rounding, weights of the experts that were chosen.
    """
    weights, ids = found[0].double().cpu(), found[1].long().cpu()
    case = case.to("cpu")
    x = case.x if case.residual is None else found[2].cpu()
    if case.residual is not None:
        check_norm(found[2].cpu(), found[3].cpu(), case)
    if case.shared_gate is not None:
        check_factors(found[4].cpu(), x, case.shared_gate)
    check_choices(weights, ids, x, case)


def check_norm(normed: Tensor, total: Tensor, case: Case) -> None:
    assert case.residual is not None and case.norm is not None
    exact = case.x.double() + case.residual.double()
    # x + residual is exact in float64, and float32's rounding may decide a tie of bfloat16.
    assert torch.equal(total, (case.x.float() + case.residual.float()).to(total.dtype))
    factor = (exact.square().mean(-1, keepdim=True) + case.epsilon).rsqrt()
    right = exact * factor * (case.norm.double() + case.norm_offset)
    assert ((normed.double() - right).abs() <= right.abs() * (2.0**-8 + 2.0**-20) + 1e-30).all()


def check_factors(factors: Tensor, x: Tensor, shared_gate: Tensor) -> None:
    """A linear layer rounds the gate's logits, and the sigmoid is rounded again."""
    assert factors.dtype == x.dtype and factors.shape == (len(x), 1)
    logits = x.double() @ shared_gate.double().T
    margin = (x.double().abs() @ shared_gate.double().abs().T) * 2.0**-20 + logits.abs() * 2.0**-8
    low, high = (logits - margin).sigmoid(), (logits + margin).sigmoid()
    assert ((factors >= low * (1 - 2.0**-8)) & (factors <= high * (1 + 2.0**-8))).all()


def check_choices(weights: Tensor, ids: Tensor, x: Tensor, case: Case) -> None:
    options: dict[str, Any] = {
        "sigmoid": False, "renormalize": True, "bias": None, "scale": 1.0, "round_logits": True,
        "padding": None,
    } | case.options  # fmt: skip
    exact = x.double() @ case.gate.double().T
    size = x.double().abs() @ case.gate.double().abs().T
    margin = size * 2.0**-20 + (exact.abs() * 2.0**-8 if options["round_logits"] else 0)
    padding = options["padding"]
    kept = ~padding[: len(x)] if padding is not None else torch.ones(len(x), dtype=torch.bool)
    assert (ids[~kept] == -1).all() and not weights[~kept].any()
    ids, weights, exact, margin = ids[kept], weights[kept], exact[kept], margin[kept]
    assert ((ids >= 0) & (ids < exact.shape[1])).all()
    assert all(len(row.unique()) == case.topk for row in ids)

    def scores_of(logits: Tensor) -> Tensor:
        return logits.sigmoid() if options["sigmoid"] else logits.softmax(-1)

    scores = scores_of(exact)
    # A score's relative error is at most twice its logit's, and softmax's sum has as much.
    error = scores * (2 * margin.amax(-1, keepdim=True)).expm1() + 1e-12
    by = scores if options["bias"] is None else scores + options["bias"].double()
    chosen, chosen_error = by.gather(1, ids), error.gather(1, ids)
    others = by.scatter(1, ids, -torch.inf)
    if case.topk < by.shape[1]:
        best, place = others.max(-1, keepdim=True)
        slack = chosen_error + error.gather(1, place)
        assert (chosen >= best - slack).all(), "an expert that is not among the best was chosen"
    drops = chosen[:, 1:] - chosen[:, :-1]
    assert (drops <= chosen_error[:, 1:] + chosen_error[:, :-1]).all(), "not in order"
    right = scores.gather(1, ids)
    if options["renormalize"]:
        right = right / right.sum(-1, keepdim=True)
    right = right * options["scale"]
    tolerance = right * (4 * margin.amax(-1, keepdim=True)).expm1() + 1e-6 * right
    assert ((weights - right).abs() <= tolerance + 1e-30).all()
