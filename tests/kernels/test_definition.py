"""The numbers of a worker's comparison with a computed reference, from tensors alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nibble.reference.inside import Inside

pytest.importorskip("vllm")
definition = pytest.importorskip("nibble.engine.plugin.report.definition")
pytestmark = pytest.mark.vllm
inside = pytest.importorskip("nibble.engine.plugin.report.inside")
NAMES = [f"model.layers.{layer}.self_attn.{part}_norm" for layer in range(2) for part in "qk"]


def model_and_reference() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Module()
    for name in NAMES:
        owner: Any = model
        *path, leaf = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        norm = torch.nn.Module()
        norm.weight = torch.nn.Parameter(torch.rand(16).bfloat16(), requires_grad=False)
        owner.add_module(leaf, norm)
    return model, {f"norm:{name}": value.data.float() for name, value in model.named_parameters()}


def test_norms_that_have_changed_places_are_named() -> None:
    model, reference = model_and_reference()
    assert definition.compare_norms(model, reference) == {"compared": 4, "wrong": []}
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm
    wrong = definition.compare_norms(model, reference)["wrong"]
    assert sorted(wrong) == [f"model.layers.1.self_attn.{part}_norm.weight" for part in "kq"]


def test_norms_that_a_model_keeps_in_another_form_are_not_compared() -> None:
    model, reference = model_and_reference()
    for value in model.parameters():
        value.data += 1
    assert definition.compare_norms(model, reference) == {"compared": 0, "wrong": []}


def test_a_layer_that_adds_too_little_is_told_by_its_factor_and_a_late_fault_by_its_half() -> None:
    torch.manual_seed(0)
    right = torch.randn(32, 64)
    noisy = right + 0.05 * torch.randn(32, 64)
    healthy = definition.compare_layer(noisy, right, right)
    assert abs(healthy["factor"] - 1) < 0.01 and 0.03 < healthy["early"] < 0.06
    assert definition.compare_layer(noisy * 0.9, right, right)["factor"] == pytest.approx(
        0.9, abs=0.01
    )
    late = noisy.clone()
    late[16:] = torch.randn(16, 64)
    found = definition.compare_layer(late, right, right)
    assert found["early"] < 0.06 and found["late"] > 1
    assert definition.compare_layer(noisy * math.nan, right, right)["late"] == math.inf


def test_one_raised_logit_is_found_among_all() -> None:
    torch.manual_seed(0)
    right = torch.randn(4, 1024) * 3
    found = right + 0.02 * torch.randn(4, 1024)
    assert abs(definition.compare_logits(found, right)["off"]) < 0.1
    found[:, 300] += 3
    told = definition.compare_logits(found, right)
    assert (
        told["token"] == 300 and told["off"] == pytest.approx(3, abs=0.1) and told["spread"] < 0.2
    )
    assert definition.compare_logits(right * 0.9, right)["factor"] == pytest.approx(0.9, abs=1e-3)


class Attention(nn.Module):
    """Products as a checkpoint has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.o_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def qv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_proj(x), self.v_proj(x)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, v = self.qv(hidden_states)
        return self.o_proj(torch.softmax(q @ q.mT / 8, -1) @ v)


class JoinedAttention(Attention):
    """The same products as vLLM has them."""

    def __init__(self, right: Attention) -> None:
        super().__init__()
        del self.q_proj, self.v_proj
        self.qv_proj, self.o_proj = nn.Linear(64, 128, bias=False), right.o_proj
        self.qv_proj.weight.data = torch.cat((right.q_proj.weight, right.v_proj.weight)).data

    def qv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, v = self.qv_proj(x).chunk(2, -1)
        return q, v


class Layer(nn.Module):
    """`fault`: what attention gives is made smaller by it."""

    def __init__(self, attention: Attention, fault: float = 1.0) -> None:
        super().__init__()
        self.self_attn, self.fault = attention, fault
        self.mlp = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))

    def forward(self, hidden_states: Tensor) -> Tensor:
        stream = hidden_states + self.self_attn(hidden_states=rounded(hidden_states)) * self.fault
        return stream + self.mlp(rounded(stream))


def rounded(x: Tensor) -> Tensor:
    """As FP4 activations: a small difference becomes a large one."""
    return (x * 2).round() / 2


def kept_and_fed(tokens: int = 24, fault: float = 1.0, skips: bool = False) -> Any:
    """What the products of a served layer met."""
    torch.manual_seed(0)
    sampled = torch.tensor([3, 9, 20, 23])
    right = Layer(Attention())
    served = Layer(JoinedAttention(right.self_attn), fault)
    served.mlp = right.mlp
    if skips:
        served.self_attn.forward = lambda hidden_states: hidden_states
    kept = Inside(right, 24, sampled, lambda: True)
    x = torch.randn(24, 64).bfloat16().float()
    with torch.no_grad():
        right(x)
        kept.finish()
        with kept.fed():
            right(x)
        reference = {f"inside:0:{name}": value for name, value in kept.tensors().items()}
        reference |= {"tokens": sampled, "ids": torch.arange(24)}
        model: Any = nn.Module()
        model.packed_modules_mapping = {"qv_proj": ["q_proj", "v_proj"]}
        met = inside.Inside(model, [served], reference, tokens)
        with met.fed():
            served(x[:tokens] + 1e-3)
    return met


def test_products_get_what_the_reference_kept_and_rounding_is_gone() -> None:
    met = kept_and_fed()
    assert met.is_complete
    assert [point["at"] for point in met.found[0]] == [
        "self_attn",
        "self_attn.o_proj",
        "mlp",
        "mlp.2",
    ]
    assert all(max(point["early"], point["late"]) < 0.01 for point in met.found[0][1::2])


def test_a_shorter_pass_meets_the_earlier_tokens() -> None:
    assert kept_and_fed(tokens=22).is_complete


def test_what_lies_between_two_products_is_told_by_the_second() -> None:
    met = kept_and_fed(fault=0.5)
    far = {point["at"]: max(point["early"], point["late"]) > 0.1 for point in met.found[0]}
    assert far == {"self_attn": False, "self_attn.o_proj": False, "mlp": True, "mlp.2": False}


def test_a_model_that_skips_a_product_is_not_complete() -> None:
    assert not kept_and_fed(skips=True).is_complete
