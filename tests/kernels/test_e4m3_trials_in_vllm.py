"""Trials of the FP8 linear layers that vLLM builds, on the CPU: vLLM's kernels are right, and a
fault is found.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.findings import findings

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS, "nibble/trials")]
# The CPU has no operator that quantizes with a scale of the tensor, and no kernel for blocks.
PROGRAM = """
import json, sys
import torch
from nibble.trials.trial import Trial
from nibble.trials.worker import e4m3
from nibble.trials.worker.tasks import Teller
from nibble.trials.worker.vllm_layers import enter_world
enter_world("cpu")
from vllm import _custom_ops
def quantized(x, scale):
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
_custom_ops.scaled_fp8_quant = quantized
for words in json.load(sys.stdin):
    found = e4m3.run(Trial.from_json(words), Teller(lambda *told: None))
    print("FOUND", json.dumps(found), flush=True)
"""
RAN = {
    "fp8": "PerTensorTorchFP8ScaledMMLinearKernel",
    "fp8-channel": "ChannelWiseTorchFP8ScaledMMLinearKernel",
}


def trial(form: str, **more: Any) -> dict[str, Any]:
    return {
        "name": form,
        "task": "e4m3",
        "kernel": f"vllm:e4m3:{form}",
        "shapes": [[256, 512], [1032, 256]],
        "rows": [1, 2, 4, 8],
        "timed_rows": [1, 8],
        "seconds_each": 0.001,
    } | more


@pytest.fixture(scope="module")
def found(installed: Any) -> dict[str, dict[str, Any]]:
    trials = {form: trial(form) for form in (*RAN, "fp8-block")}
    trials |= {f"{form} {plant}": trial(form, plant=plant) for form in RAN for plant in FAULTS}
    results = findings(installed, ["-c", PROGRAM], list(trials.values()))
    return dict(zip(trials, results, strict=True))


FAULTS = {"wrong": "wrong", "nan": "not finite"}


@pytest.mark.parametrize("form", RAN)
def test_vllms_layers_are_right_with_rounded_activations_and_have_times(
    found: dict[str, dict[str, Any]], form: str
) -> None:
    outcome = found[form]
    assert outcome["verdict"] == "right" and outcome["ran"] == RAN[form], outcome
    assert 0.01 < outcome["error"] < 0.04
    assert {shape: set(times) for shape, times in outcome["times"].items()} == {
        "256x512": {"1", "8"},
        "1032x256": {"1", "8"},
    }


@pytest.mark.parametrize("form", RAN)
@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_found(found: dict[str, dict[str, Any]], form: str, plant: str) -> None:
    assert found[f"{form} {plant}"]["verdict"] == FAULTS[plant]


def test_scales_for_which_vllm_has_no_kernel_are_no_fault(
    found: dict[str, dict[str, Any]],
) -> None:
    outcome = found["fp8-block"]
    assert outcome["verdict"] in ("refused", "right"), outcome
