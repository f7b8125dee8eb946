"""Trials of experts on the CPU: nibble's, and a layer that vLLM builds, with its times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.changes import OPERATORS
from tests.support.in_vllm.findings import findings

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS, "nibble/trials")]
SHAPES = [[4, 2, 128, 96, 2], [6, 3, 64, 48, 2]]
# vLLM has no NVFP4 experts for the CPU: nibble's take their place, which round FP4 activations.
PROGRAM = """
import json, sys
from nibble.trials.trial import Trial
from nibble.trials.worker import experts
from nibble.trials.worker.tasks import Teller
from nibble.trials.worker.vllm_layers import enter_world
enter_world("cpu")
from vllm.model_executor.layers.quantization import modelopt
from nibble.engine.plugin import cpu
from nibble.trials.worker import vllm_experts
modelopt.ModelOptNvFp4Config.FusedMoEMethodCls = cpu.CpuModelOptNvFp4MoE
for words in json.load(sys.stdin):
    compares = words.pop("compares_in_fp4", False)
    vllm_experts._compares_in_fp4 = lambda device: compares
    found = experts.run(Trial.from_json(words), Teller(lambda *told: None))
    print("FOUND", json.dumps(found), flush=True)
"""


def trial(kernel: str) -> dict[str, Any]:
    return {
        "name": kernel,
        "task": "experts",
        "kernel": kernel,
        "shapes": SHAPES,
        "rows": [1, 5, 17],
        "timed_rows": [1, 16],
        "seconds_each": 0.001,
    }


@pytest.fixture(scope="module")
def found(installed: Any) -> list[dict[str, Any]]:
    trials = [trial(name) for name in ("experts", "vllm:experts:bf16", "vllm:experts:fp4")]
    up_alone = {"shapes": [[6, 3, 64, 48, 1]]}
    trials += [trials[0] | up_alone, trials[0] | {"plant": "wrong"}]
    # vLLM builds a layer of a name once in a process.
    in_fp4 = {"compares_in_fp4": True, "shapes": [[4, 2, 128, 64, 2]]}
    trials += [trial("w4a4-experts") | in_fp4, trial("vllm:experts:fp4") | in_fp4]
    other = {"plant": "wrong", "shapes": [[5, 2, 128, 64, 2]]}
    trials += [trial("vllm:experts:fp4") | in_fp4 | other]
    return findings(installed, ["-c", PROGRAM], trials)


def test_both_are_right_and_have_times(found: list[dict[str, Any]]) -> None:
    for outcome, ran in zip(found[:2], ("nibble", "CpuModelOptNvFp4MoE"), strict=True):
        assert outcome["verdict"] == "right" and outcome["ran"] == ran, outcome
        assert outcome["error"] < 0.005
        assert set(outcome["times"]) == {"4x2x128x96x2", "6x3x64x48x2"}
        assert all(set(times) == {"1", "16"} for times in outcome["times"].values())


def test_a_kernel_that_rounds_the_activations_is_not_compared(found: list[dict[str, Any]]) -> None:
    assert found[2]["verdict"] == "refused" and "quantizes the activations" in found[2]["detail"]


def test_with_fp4_products_both_round_them_and_have_times(found: list[dict[str, Any]]) -> None:
    for outcome, ran in zip(found[5:7], ("nibble", "CpuModelOptNvFp4MoE"), strict=True):
        assert outcome["verdict"] == "right" and outcome["ran"] == ran, outcome
        assert set(outcome["times"]["4x2x128x64x2"]) == {"1", "16"}
    assert found[7]["verdict"] == "wrong"


def test_experts_without_a_gate_are_right(found: list[dict[str, Any]]) -> None:
    assert found[3]["verdict"] == "right"


def test_a_planted_fault_is_found(found: list[dict[str, Any]]) -> None:
    assert found[4]["verdict"] == "wrong" and "4x2x128x96x2 with 1 tokens" in found[4]["detail"]


def test_nothing_stays_in_the_temporary_folder(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    findings(installed, ["-c", PROGRAM], [trial("experts")])
    assert not list(tmp_path.glob("nibble*"))
