"""Trials of operators for GPUs on the CPU, where each operator is its specification: what they find
right, and faults that they find.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble.trials import run as run_module
from nibble.trials.run import run_trials
from nibble.trials.trial import Fault, Trial, Verdict
from tests.support.changes import OPERATORS
from tests.support.paths import ROOT, python_path

pytestmark = pytest.mark.when_changed(*OPERATORS, "nibble/trials")

LINEAR = ((136, 160), (24, 288))
W4A4 = Trial("w4a4", "linear", "w4a4:fp4", "cpu", LINEAR, (1, 19))
WHOLE = Trial("nibble:fp4", "linear", "nibble:fp4", "cpu", LINEAR, (1, 16, 17, 600))
FP8 = Trial("fp8", "fp8", "fp8", "cpu", ((136, 160), (264, 272)), (1, 9, 33))
E4M3 = Trial("e4m3", "e4m3", "e4m3", "cpu", ((136, 160), (272, 272)), (1, 2, 4, 8))
SPARSE = Trial("sparse", "linear", "sparse", "cpu", LINEAR, (1, 9, 65))
EXPERTS = Trial(
    "w4a4-experts",
    "experts",
    "w4a4-experts",
    "cpu",
    ((4, 2, 128, 96, 2), (6, 3, 144, 48, 1)),
    (1, 17),
)
TRIALS = [W4A4, WHOLE, FP8, E4M3, SPARSE, EXPERTS]
OF_EACH = pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)


def result(trial: Trial) -> dict[str, Any]:
    from nibble.trials.worker.tasks import TASKS, Teller

    return TASKS[trial.task](trial, Teller(lambda *told: None))


@OF_EACH
def test_what_is_specified_is_right(kernels: ModuleType, trial: Trial) -> None:
    found = result(trial)
    assert found["verdict"] == "right" and found["error"] < 0.005, found


@OF_EACH
@pytest.mark.parametrize(("fault", "verdict"), [("wrong", "wrong"), ("nan", "not finite")])
def test_a_planted_fault_is_found(
    kernels: ModuleType, trial: Trial, fault: Fault, verdict: Verdict
) -> None:
    found = result(replace(trial, plant=fault))
    assert found["verdict"] == verdict, found


@pytest.mark.parametrize(
    ("trial", "count"),
    [(FP8, 2), (E4M3, 2), (SPARSE, 2), (WHOLE, 2)],
    ids=["fp8", "e4m3", "sparse", "nibble:fp4"],
)
def test_a_right_kernel_has_times(kernels: ModuleType, trial: Trial, count: int) -> None:
    found = result(replace(trial, timed_rows=(1, 16), seconds_each=0.001))
    assert len(found["times"]) == count
    assert all(set(times) == {"1", "16"} for times in found["times"].values())


def test_a_hanging_and_a_crashing_kernel_cost_their_process(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"start": 90.0, "prepare": 60.0, "run": 1.0}
    monkeypatch.setattr(run_module, "PHASE_LIMITS", limits)
    faults: dict[Fault, Verdict] = {"hang": "hung", "crash": "crashed"}
    trials = [
        replace(trial, plant=fault)
        for trial, fault in zip((FP8, SPARSE, E4M3), ("hang", "crash", "hang"), strict=True)
    ]
    environ = os.environ | {"PYTHONPATH": python_path(installed, ROOT)}
    outcomes = run_trials(trials, environ, at_once=2)
    expected = [faults[trial.plant] for trial in trials if trial.plant]
    assert [outcome.verdict for outcome in outcomes] == expected, outcomes


# --- faults that these kernels could have ---


@pytest.mark.parametrize("which", [0, 1], ids=["of x", "of the weight"])
@pytest.mark.parametrize("blockwise", [False, True])
def test_a_scale_of_another_row_or_block_is_found(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, which: int, blockwise: bool
) -> None:
    import nibble_kernels.fp8_linear as module

    right: Any = module.fp8_linear

    def wrong(*given: Any, **options: Any) -> Tensor:
        x, weight, *scales, dtype = given
        if options["blockwise"] == blockwise:
            scales[which] = scales[which].roll(1, -1)
        return right(x, weight, *scales, dtype, **options)

    monkeypatch.setattr(module, "fp8_linear", wrong)
    found = result(FP8)
    kind = "block" if blockwise else "channel"
    assert found["verdict"] == "wrong" and f"scales of a {kind}" in found["detail"], found


@pytest.mark.parametrize("part", ["tensor", "channel", "block", "bias"])
def test_another_scale_or_bias_of_an_e4m3_weight_is_found(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """In one kind of scales alone."""
    import nibble_kernels.e4m3_linear as module

    right: Any = module.e4m3_decode_linear

    def wrong(x: Tensor, weight: Tensor, scales: Any, bias: Tensor | None = None) -> Tensor:
        columns, tiles = scales.columns, scales.tiles
        kind = "channel" if columns is not None else "block" if tiles.unique().numel() > 1 else ""
        if part == "bias" and bias is not None:
            bias = bias.roll(1)
        elif part == "channel" and columns is not None:
            columns = columns.roll(1)
        elif part == "block" == kind:
            tiles = tiles.roll(1, 1)
        elif part == "tensor" and not kind:
            tiles = tiles * 1.05
        return right(x, weight, module.E4m3Scales(tiles, columns), bias=bias)

    monkeypatch.setattr(module, "e4m3_decode_linear", wrong)
    found = result(E4M3)
    kind = "channel" if part == "bias" else part
    assert found["verdict"] == "wrong" and f"scales of a {kind}" in found["detail"], found


def test_a_number_at_another_place_of_its_four_is_found(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nibble_kernels.nvfp4_sparse as module

    right: Any = module.pack_sparse

    def wrong(*given: Any, **options: Any) -> Any:
        packed = right(*given, **options)
        packed.places[-1, 0] ^= 1
        return packed

    monkeypatch.setattr(module, "pack_sparse", wrong)
    assert result(SPARSE)["verdict"] == "wrong"


@pytest.mark.parametrize("trial", [W4A4, WHOLE], ids=lambda trial: trial.name)
@pytest.mark.parametrize("option", ["column_scale", "bias", "silu_mul"])
def test_a_fault_after_the_sum_is_found(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, trial: Trial, option: str
) -> None:
    """Of the operator alone, and of the whole one."""
    import nibble_kernels.nvfp4_linear.w4a4 as module

    name = "nvfp4_w4a4_linear" if trial is W4A4 else "nvfp4_w4a4_weight_linear"
    right: Any = getattr(module, name)

    def wrong(*given: Any, **options: Any) -> Tensor:
        value = options.get(option)
        if isinstance(value, Tensor):
            options[option] = value.roll(1)
        y = right(*given, **options)
        return y * 1.1 if value is True else y

    monkeypatch.setattr(module, name, wrong)
    found = result(trial)
    what = "silu" if option == "silu_mul" else "factors and bias"
    assert found["verdict"] == "wrong" and what in found["detail"], found


def test_columns_that_the_kernel_does_not_take_are_no_fault(kernels: ModuleType) -> None:
    found = result(replace(WHOLE, shapes=((136, 176),)))
    assert found["verdict"] == "refused" and "no columns in 32s" in found["detail"]


@pytest.mark.parametrize("which", [0, 1])
def test_an_input_scale_of_another_expert_is_found(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    import nibble_kernels.nvfp4_moe.w4a4 as module

    right: Any = module.nvfp4_w4a4_moe

    def wrong(*given: Any, **options: Any) -> Tensor:
        *before, first, second = given
        scales = [first, second]
        scales[which] = scales[which].flip(0)
        return right(*before, *scales, **options)

    monkeypatch.setattr(module, "nvfp4_w4a4_moe", wrong)
    assert result(EXPERTS)["verdict"] == "wrong"


def test_both_codes_of_a_byte_stay_in_a_sparse_weight(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_sparse import share_that_is_not_sparse

    from nibble.trials.worker.truth import Weight, two_of_four

    codes = torch.full((96, 8), 0x53, dtype=torch.uint8)
    weight = two_of_four(Weight(codes, torch.ones(96, 1).to(torch.float8_e4m3fn)))
    assert share_that_is_not_sparse(weight.codes) == 0
    for nibble in (weight.codes & 15, weight.codes >> 4):
        assert (nibble != 0).any(-1).all()
