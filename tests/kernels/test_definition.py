"""The numbers of a worker's comparison with a computed reference, from tensors alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
definition = pytest.importorskip("nibble_kernels.vllm_plugin.proof.definition")
pytestmark = pytest.mark.vllm
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
    assert definition.compare_layer(noisy * 0.9, right, right)["factor"] == pytest.approx(0.9, abs=0.01)
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
    assert told["token"] == 300 and told["off"] == pytest.approx(3, abs=0.1) and told["spread"] < 0.2
    assert definition.compare_logits(right * 0.9, right)["factor"] == pytest.approx(0.9, abs=1e-3)
