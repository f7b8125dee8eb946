"""Compares a shared expert that the routed ones' kernel computes with its own linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nibble.engine.plugin.report.compare import Result, compare
from nibble.engine.plugin.report.formats import generator_of, random_input, random_routing
from nibble.engine.plugin.shared_expert import JoinedExpert

KIND = "shared expert among the routed ones"
ROWS = 6


def shared_results(
    name: str, runner: Any, expert: JoinedExpert, device: torch.device
) -> Iterator[Result]:
    """One row, and then all: few rows and many have other kernels. The routed experts alone are
    compared elsewhere.
    """
    routed, moe = runner.routed_experts, runner.moe_config
    rows = random_input(name, ROWS, moe.hidden_dim, None, dtype=moe.in_dtype).to(device)
    weights, ids = random_routing(name, ROWS, moe.num_experts, moe.experts_per_token)
    factors = torch.rand(ROWS, 1, generator=generator_of(f"{name} shared")).to(rows)
    for count in (1, ROWS):
        x, scale = rows[:count], factors[:count]
        given = {
            "topk_weights": weights[:count].to(device),
            "topk_ids": ids[:count].to(device),
        }
        both = routed.forward_modular(x=x.clone(), shared_experts_input=scale, **given)
        others = routed.forward_modular(x=x.clone(), **given)
        expected = others.float() + scale.float() * expert.alone(x).float()
        yield compare("moe", KIND, name, both, {"bf16": expected.cpu()})
