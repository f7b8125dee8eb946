"""Layers against what is right: errors, formats, values that are not finite, and what /status
gets of many layers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

RIGHT = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def compared(found: torch.Tensor, part: Any = "linear", **forms: torch.Tensor) -> Any:
    from nibble.engine.plugin.report.compare import compare

    return compare(part, "kind", "layer", found, forms or {"plain": RIGHT})


def test_rounding_to_bf16_is_right() -> None:
    assert compared(RIGHT.bfloat16()).problem == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_wrong(value: float) -> None:
    found = RIGHT.clone()
    found[3, 7] = value
    result = compared(found)
    assert (result.problem, result.error) == ("NaN or infinity", float("inf"))


def test_one_wrong_row_of_many_is_wrong() -> None:
    found = RIGHT.clone()
    found[2] *= 1.1
    assert "off by 0.1, at most 0.02" in compared(found).problem


def test_the_nearest_form_of_activations_is_told() -> None:
    other = RIGHT + 0.1 * RIGHT.flip(0)
    assert compared(other.bfloat16(), bf16=RIGHT, fp4=other).form == "fp4"
    assert compared(RIGHT.bfloat16(), bf16=RIGHT, fp4=other).form == "bf16"


def test_another_shape_is_wrong() -> None:
    assert compared(RIGHT[:, :-1]).error == float("inf")


def test_many_layers_are_one_entry_a_kind() -> None:
    from nibble.engine.plugin.report.compare import Result, group

    wrong = compared(RIGHT * 2)
    fine = Result("linear", "kind", "other", "plain", 0.001)
    blank = Result("routing", "Grouped", "router", problem="no reference for this routing")
    linear, routing = group([wrong, fine, fine, blank])
    assert (linear["layers"], linear["compared"], linear["wrong"], linear["worst_error"]) == (
        2,
        2,
        1,
        1.0,
    )
    assert linear["wrong_layers"] == ["layer: off by 1, at most 0.02"]
    assert (routing["compared"], routing["not_compared"]) == (0, ["no reference for this routing"])


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["input_scale", "input_global_scale", "w13_input_scale"])
def test_room_for_scales_of_activations_that_no_file_has_is_no_scale(name: str) -> None:
    """Weight-only ModelOpt layers: random inputs as large as NaN made every one of them wrong."""
    from nibble.engine.plugin.layers import mark_unloaded
    from nibble.engine.plugin.report.formats import global_scales

    of = name.partition("input")[0] + "input"
    layer = SimpleNamespace(**{name: torch.ones(3)})
    assert global_scales(layer, of) is not None
    mark_unloaded(layer, name)
    assert global_scales(layer, of) is None


@pytest.mark.vllm
def test_a_check_waits_for_no_other_data_parallel_replica() -> None:
    """There is no group of them here: asking them would raise."""
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.forward_context import get_forward_context

    from nibble.engine.plugin.report.attention import pass_of_this_worker

    config = VllmConfig(parallel_config=ParallelConfig(data_parallel_size=2, data_parallel_rank=1))
    config.parallel_config.is_moe_model = True
    with pass_of_this_worker(config, 5):
        metadata = get_forward_context().dp_metadata
        assert metadata is not None and metadata.num_tokens_across_dp_cpu.tolist() == [5, 5]


@pytest.mark.vllm
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_takes_the_experts_with_the_highest_scores_plus_bias(
    function: str, renormalize: bool
) -> None:
    from nibble.engine.plugin.report.routing import route

    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0])
    router = SimpleNamespace(
        top_k=2, scoring_func=function, renormalize=renormalize, e_score_correction_bias=bias
    )
    weights = route(router, logits)
    scores = logits.softmax(-1) if function == "softmax" else logits.sigmoid()
    expected = torch.tensor([[scores[0, 0], scores[0, 1], 0.0, 0.0]])
    torch.testing.assert_close(weights, expected / expected.sum() if renormalize else expected)


class FusedTopKRouter:
    """As vLLM's: softmax, then the experts with the highest scores. Of equal experts it takes the
    last ones, torch's topk any.
    """

    top_k, scoring_func, renormalize, e_score_correction_bias = 8, "softmax", True, None
    global_num_experts = 128

    def select_experts(self, hidden: Any, logits: torch.Tensor, indices: Any) -> Any:
        assert len(hidden) == len(logits)
        scores = logits.float().softmax(-1)
        ids = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        ids = logits.shape[1] - 1 - ids
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True), ids


class WrongRouter(FusedTopKRouter):
    def select_experts(self, hidden: Any, logits: torch.Tensor, indices: Any) -> Any:
        weights, ids = super().select_experts(hidden, logits, indices)
        return weights, (ids + 1) % logits.shape[1]


WrongRouter.__name__ = "FusedTopKRouter"


def routing_of(router: Any, layer: int) -> Any:
    (result,) = results_of(router, layer)
    return result


def results_of(router: Any, layer: int) -> list[Any]:
    from nibble.engine.plugin.report.routing import routing_results

    method = SimpleNamespace(is_monolithic=False, topk_indices_dtype=torch.int32)
    moe = SimpleNamespace(
        hidden_dim=64, in_dtype=torch.bfloat16, router_logits_dtype=torch.bfloat16
    )
    runner = SimpleNamespace(
        router=router, moe_config=moe, routed_experts=SimpleNamespace(quant_method=method)
    )
    name = f"routing of model.layers.{layer}.mlp.experts"
    return list(routing_results(name, runner, torch.device("cpu")))


@pytest.mark.vllm
def test_a_router_may_choose_between_experts_of_equal_score() -> None:
    """Two of 128 BF16 logits are often equal: healthy routers were reported as wrong."""
    results = [routing_of(FusedTopKRouter(), layer) for layer in range(48)]
    assert {result.problem for result in results} == {""}
    assert all("off by" in routing_of(WrongRouter(), layer).problem for layer in range(48))


@pytest.mark.vllm
@pytest.mark.parametrize("round_logits", [True, False])
def test_a_fused_gate_is_compared_too(kernels: object, round_logits: bool) -> None:
    from nibble.engine.plugin.router.gate import FusedGate, Route

    def result(route: Any, layer: int) -> str:
        weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(layer)) / 8
        router: Any = FusedTopKRouter()
        router.fused_gate = FusedGate(SimpleNamespace(weight=weight.bfloat16()), route)
        plain, fused = results_of(router, layer)
        assert (plain.kind, plain.problem) == ("FusedTopKRouter", "")
        assert fused.kind == "route_experts"
        return fused.problem

    route = Route(8, False, True, None, 1.0, round_logits)
    assert {result(route, layer) for layer in range(24)} == {""}
    wrong = (
        route._replace(topk=7),
        route._replace(renormalize=False),
        route._replace(sigmoid=True),
    )
    assert all("off by" in result(one, layer) for one in wrong for layer in range(4))


@pytest.mark.vllm
def test_rows_with_two_experts_at_the_border_leave_a_choice() -> None:
    from nibble.engine.plugin.report.routing import leaves_no_choice

    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.25, 0.25, 0.1], [0.4, 0.4, 0.1, 0.1]])
    assert leaves_no_choice(scores, 2).tolist() == [True, False, True]
    assert leaves_no_choice(scores, 4).tolist() == [True, True, True]
