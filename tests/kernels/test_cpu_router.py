"""Routers of vLLM's CPU platform add a correction bias where experts are not in groups, as those
of GPUs do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_router")
pytestmark = pytest.mark.vllm
ROWS, EXPERTS, TOP_K = 32, 8, 2
BIAS = torch.linspace(0.5, -0.5, EXPERTS)  # other experts than by the scores alone


@pytest.fixture(autouse=True)
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's class with nibble's change, for this test."""
    found: Any = plugin.cpu_router.CPURouter
    monkeypatch.setattr(found, "_compute_routing", found._compute_routing)
    plugin.add_biases()
    return found


def chosen(router: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0))
    made = router(top_k=TOP_K, global_num_experts=EXPERTS, **options)
    weights, ids = made._compute_routing(torch.zeros(ROWS, 4), logits, None)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    return logits, weights, ids.long()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_bias_chooses_and_the_weights_are_the_scores(
    router: Any, scores: str, renormalize: bool
) -> None:
    options = {"scoring_func": scores, "renormalize": renormalize, "routed_scaling_factor": 2.5}
    logits, weights, ids = chosen(router, e_score_correction_bias=BIAS, **options)
    values = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    right = (values + BIAS).topk(TOP_K).indices
    assert torch.equal(ids.sort().values, right.sort().values)
    assert not torch.equal(right.sort().values, values.topk(TOP_K).indices.sort().values)
    wanted = values.gather(1, ids)
    wanted = wanted / wanted.sum(-1, keepdim=True) if renormalize else wanted
    assert torch.allclose(weights, 2.5 * wanted)


def test_sigmoid_scores_need_no_bias(router: Any) -> None:
    logits, weights, ids = chosen(router, scoring_func="sigmoid", renormalize=False)
    assert torch.allclose(weights, logits.sigmoid().gather(1, ids))


def test_plain_softmax_and_other_routing_stay_vllms_own(router: Any) -> None:
    logits, weights, ids = chosen(router)
    assert torch.allclose(weights, logits.gather(1, ids).softmax(-1))

    def own(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool) -> Any:
        return torch.ones(ROWS, topk), torch.zeros(ROWS, topk)

    _, weights, ids = chosen(router, custom_routing_function=own, e_score_correction_bias=BIAS)
    assert weights.eq(1).all() and ids.eq(0).all()
