"""Compares a router of experts with plain softmax or sigmoid scores, on random logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from nibble_kernels.router import weights_and_ids
from torch import Tensor

from nibble.engine.plugin.report.compare import Result, compare
from nibble.engine.plugin.report.formats import generator_of
from nibble.engine.plugin.report.probes import Unknown

ROWS = 16
PLAIN_ROUTERS = ("FusedTopKRouter", "FusedTopKBiasRouter", "CPURouter")
# Scores nearer to each other than this share of them count as equal. Routers compute in float32.
NEAR = 1e-5


def routing_results(name: str, runner: Any, device: torch.device) -> Iterator[Result]:
    """Compare a router's weights: [rows, experts], 0 for experts not chosen. Raises Unknown."""
    router, moe = runner.router, runner.moe_config
    kind = type(router).__name__.removeprefix("Nibble")
    others = ("custom_routing_function", "_hash_indices_table", "eplb_state", "bias_vl")
    is_plain = kind in PLAIN_ROUTERS and not getattr(router, "use_grouped_topk", False)
    if not is_plain or any(getattr(router, other, None) is not None for other in others):
        raise Unknown("no reference for this routing")
    if (
        getattr(router, "routed_scaling_factor", 1.0) != 1.0
        or runner.routed_experts.quant_method.is_monolithic
    ):
        raise Unknown("no reference for this routing")
    experts = router.global_num_experts
    logits = random_logits(name, router, experts, moe.router_logits_dtype)
    hidden = torch.randn(ROWS, moe.hidden_dim, generator=generator_of(name)).to(moe.in_dtype)
    indices = runner.routed_experts.quant_method.topk_indices_dtype
    weights, ids = router.select_experts(
        hidden[: len(logits)].to(device), logits.to(device), indices
    )
    routed = torch.zeros(len(logits), experts)
    routed.scatter_(1, ids.long().cpu(), weights.float().cpu())
    yield compare("routing", kind, name, routed, {"plain": route(router, logits.float())})
    gate = getattr(router, "fused_gate", None)
    if gate is not None:
        yield fused_result(name, router, gate, hidden.shape[1], device)


def fused_result(name: str, router: Any, gate: Any, columns: int, device: torch.device) -> Result:
    """Compare nibble's kernel for gate and choice on random rows that leave no choice, also where a
    logit lies between two numbers of BF16. Raises Unknown.
    """
    x = torch.randn(8 * ROWS, columns, generator=generator_of(f"{name} gate")).to(torch.bfloat16)
    weight = gate.gate.weight.detach().double().cpu()
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.T.abs()
    dtype = torch.bfloat16 if gate.route.round_logits else torch.float32
    logits = exact.to(dtype).float()
    by = choice_scores(router, logits)[1]
    clear = leaves_no_choice(by, router.top_k)
    if gate.route.round_logits:
        low, high = ((exact + side * 2.0**-20 * size).to(dtype) for side in (-1, 1))
        best = by.topk(min(router.top_k + 2, by.shape[1])).indices
        clear &= (low == high).gather(1, best).all(-1)
    if not clear.any():
        raise Unknown("in all random inputs a rounding decides the choice")
    x, logits = x[clear][:ROWS], logits[clear][:ROWS]
    weights, ids = weights_and_ids(gate(x.to(device))[0])
    routed = torch.zeros(len(logits), logits.shape[1])
    routed.scatter_(1, ids.long().cpu(), weights.float().cpu())
    return compare("routing", "route_experts", name, routed, {"plain": route(router, logits)})


def random_logits(name: str, router: Any, experts: int, dtype: torch.dtype | None) -> Tensor:
    """Up to ROWS rows of logits [rows, experts] that leave no choice between equal experts.

    Of 128 BF16 logits two are often equal, and a kernel may then take another expert than torch.
    Raises Unknown if no row is clear.
    """
    generator = generator_of(f"{name} logits")
    drawn = torch.randn(8 * ROWS, experts, generator=generator, dtype=torch.float32).to(dtype)
    clear = drawn[leaves_no_choice(choice_scores(router, drawn.float())[1], router.top_k)]
    if not len(clear):
        raise Unknown("in all random inputs several experts have one score")
    return clear[:ROWS]


def leaves_no_choice(scores: Tensor, top_k: int) -> Tensor:
    """bool [rows]: whether the last chosen expert has clearly more than the first other one."""
    if top_k >= scores.shape[1]:
        return torch.ones(len(scores), dtype=torch.bool)
    last, other = scores.topk(top_k + 1, dim=-1).values[:, -2:].unbind(-1)
    return last - other > NEAR * last.abs()


def choice_scores(router: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of experts, and the scores plus bias by which they are chosen. Raises Unknown."""
    function = {"softmax": lambda values: values.softmax(-1), "sigmoid": torch.sigmoid}.get(
        router.scoring_func
    )
    if function is None:
        raise Unknown(f"no reference for scores by {router.scoring_func}")
    scores, bias = function(logits), getattr(router, "e_score_correction_bias", None)
    return scores, scores if bias is None else scores + bias.float().cpu()


def route(router: Any, logits: Tensor) -> Tensor:
    """The reference router: weights, float32 [rows, experts], from softmax or sigmoid scores.

    The top-k experts are chosen by score plus bias. Raises Unknown.
    """
    scores, by = choice_scores(router, logits)
    chosen = by.topk(router.top_k, dim=-1).indices
    weights = torch.zeros_like(scores).scatter_(1, chosen, scores.gather(1, chosen))
    return weights / weights.sum(-1, keepdim=True) if router.renormalize else weights
