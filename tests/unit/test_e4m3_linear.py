"""The kernel of FP8 linear layers beside NVFP4 weights: whose it is in a plan, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_linear_kernel import plan

from nibble.checkpoint import read_checkpoint
from nibble.cli import tune
from nibble.engine.contract import Options
from nibble.errors import NibbleError
from nibble.machine.hardware import Hardware
from nibble.plan.e4m3_linear import BF16_ACTIVATIONS
from nibble.plan.linear_shapes import e4m3_uses
from nibble.plan.plan import Plan
from nibble.serve import first_trials
from nibble.trials import tune as tune_module
from nibble.trials.choose import Use
from nibble.trials.trial import Outcome, Verdict, shape_name
from tests.support.hardware import B200, HOPPER, SM120, SPARK
from tests.support.models.tiny_checkpoint import (
    LINEAR_SHAPES,
    Tensors,
    linear,
    tensors,
    write_checkpoint,
)
from tests.support.tried_machine import Machine

FLAG = "--additional-config"
OF_FP8 = "self_attn"


def mixed_config() -> dict[str, Any]:
    def entry(name: str) -> dict[str, Any]:
        if OF_FP8 in name:
            return {"quant_algo": "FP8"}
        return {"quant_algo": "W4A16_NVFP4", "group_size": 16}

    layers = {f"model.layers.0.{name}": entry(name) for name in LINEAR_SHAPES}
    return {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        }
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Attention in FP8, the MLP in NVFP4."""
    return write_checkpoint(tmp_path / "mixed", mixed_tensors(), mixed_config())


def mixed_tensors() -> Tensors:
    weights = tensors("w4a16")
    for name, (rows, columns) in LINEAR_SHAPES.items():
        if OF_FP8 in name:
            stem = f"model.layers.0.{name}."
            weights = {key: value for key, value in weights.items() if not key.startswith(stem)}
            weights |= linear(stem[:-1], rows, columns, "fp8")
    return weights


def reason(found: Plan, kernel: str) -> str:
    """Why it is that kernel, of a plan that tells vLLM so."""
    told = found.args[FLAG].value.get("nibble", {}) if FLAG in found.args else {}
    assert told.get("e4m3_linear", "vllm") == found.choices["e4m3_linear"].value == kernel
    assert Options.from_config({"nibble": told}).e4m3_linear == kernel
    return found.choices["e4m3_linear"].reason


def test_hopper_takes_nibbles_kernel_for_few_rows(mixed: Path) -> None:
    assert reason(plan(mixed), "nibble") == BF16_ACTIVATIONS


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200"])
def test_elsewhere_vllms_kernel_multiplies_alone(mixed: Path, target: str) -> None:
    assert "tested only on hopper" in reason(plan(mixed, target=target), "vllm")


def test_the_linear_kernel_that_the_user_names_is_that_of_fp8_layers_too(mixed: Path) -> None:
    assert reason(plan(mixed, "--linear-kernel", "vllm"), "vllm") == "set by the user"
    named = plan(mixed, target="sm120", NIBBLE_LINEAR_KERNEL="nibble")
    assert reason(named, "nibble") == "set by the user"
    told = plan(mixed, FLAG, '{"nibble": {"e4m3_linear": "vllm"}}')
    assert reason(told, "vllm") == "set by the user"
    assert told.choices["linear_kernel"].value == "nibble"


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        ((), {"VLLM_EXTRA_ARGS": "--linear-backend marlin"}, "marlin names another kernel"),
        ((), {"VLLM_BATCH_INVARIANT": "1"}, "depends on the number of rows"),
        (("--enable-lora",), {}, "layers with adapters keep vLLM's kernel"),
        (("--dtype", "float16"), {}, "needs BF16 activations"),
    ],
    ids=str,
)
def test_what_nibbles_kernel_does_not_do_is_vllms(
    mixed: Path, words: tuple[str, ...], environ: dict[str, str], why: str
) -> None:
    assert why in reason(plan(mixed, *words, **environ), "vllm")


def test_checkpoints_without_such_layers_have_no_choice(mixed: Path, tmp_path: Path) -> None:
    for form, config in (("w4a16", "W4A16_NVFP4"), ("fp8", "FP8")):
        quantization = {"quant_method": "modelopt", "quant_algo": config, "ignore": ["lm_head"]}
        folder = write_checkpoint(
            tmp_path / form, tensors(form), {"quantization_config": quantization}
        )
        assert "e4m3_linear" not in plan(folder).choices
    assert "e4m3_linear" not in plan(mixed, target="cpu").choices


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"e4m3_linear is '8x16'"):
        Options.from_config({"nibble": {"e4m3_linear": "8x16"}})


# --- with results of trials on this machine ---

FAULTS: tuple[Verdict, ...] = ("wrong", "not finite", "hung", "crashed")
ON_EACH = pytest.mark.parametrize(
    ("hardware", "target"),
    [(HOPPER, "hopper"), (SPARK, "gb10"), (SM120, "sm120"), (B200, "b200")],
    ids=["hopper", "gb10", "sm120", "b200"],
)


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: Hardware, target: str
) -> Machine:
    return Machine(tmp_path, monkeypatch, hardware)


@ON_EACH
def test_without_results_a_target_decides_and_elsewhere_a_start_tries_it(
    machine: Machine, mixed: Path, target: str
) -> None:
    if target == "hopper":
        assert reason(machine.plan(mixed), "nibble") == BF16_ACTIVATIONS
        return
    why = "nibble's kernel is tested only on hopper"
    hint = "; a start here, or `nibble tune`, tries it on this machine"
    assert reason(machine.plan(mixed), "vllm") == why + hint
    assert reason(machine.plan(mixed, NIBBLE_TRIALS="off"), "vllm") == why


@ON_EACH
def test_a_right_and_faster_kernel_is_taken_and_a_slower_one_is_not(
    machine: Machine, mixed: Path, target: str
) -> None:
    machine.measured_e4m3(mixed, target, 0.75)
    found = machine.plan(mixed)
    assert reason(found, "nibble") == (
        "measured on this machine: nibble's kernel takes 0.75 of vLLM's time in the mean (15.0 µs"
        " vs 20.0 µs for all layers with 1 row)"
    )
    shown = found.to_json()["e4m3_shapes"]
    assert [(each["shape"], each["kernel"], each["ratio"]) for each in shown] == [
        ("128x64", "nibble", 0.75),
        ("64x64", "nibble", 0.75),
    ]
    machine.measured_e4m3(mixed, target, 1.5)
    found = machine.plan(mixed)
    assert "takes 1.50 of vLLM's time in the mean (30.0 µs vs 20.0 µs" in reason(found, "vllm")
    assert {each["kernel"] for each in found.to_json()["e4m3_shapes"]} == {"vllm"}


def test_the_time_of_all_layers_decides(blackwell: Machine, mixed: Path) -> None:
    blackwell.measured_e4m3(mixed, "sm120", {"128x64": 0.6, "64x64": 1.3})
    assert "0.95 of vLLM's time" in reason(blackwell.plan(mixed), "nibble")
    blackwell.measured_e4m3(mixed, "sm120", {"128x64": 0.6, "64x64": 1.5})
    assert "1.05 of vLLM's time" in reason(blackwell.plan(mixed), "vllm")


def test_rows_that_a_server_does_not_reach_do_not_count(blackwell: Machine, mixed: Path) -> None:
    blackwell.measured_e4m3(mixed, "sm120", 1.25)
    blackwell.measured_e4m3(mixed, "sm120", 0.5, rows="8")
    assert reason(blackwell.plan(mixed, MAX_NUM_SEQS="8"), "nibble")
    assert "takes 1.25 of" in reason(blackwell.plan(mixed, MAX_NUM_SEQS="1"), "vllm")


@ON_EACH
@pytest.mark.parametrize("verdict", FAULTS)
def test_a_kernel_with_a_fault_is_named_and_not_used(
    machine: Machine, mixed: Path, target: str, verdict: Verdict
) -> None:
    machine.measured_e4m3(mixed, target, 0.5, ours=verdict)
    why = f"nibble's kernel is not used: e4m3: {verdict}"
    assert reason(machine.plan(mixed), "vllm") == why
    named = machine.plan(mixed, "--linear-kernel", "nibble")
    assert reason(named, "nibble") == "set by the user"
    assert f"nibble's FP8 kernel failed on this machine: e4m3: {verdict}" in named.notices


def test_a_fault_of_vllms_kernel_is_a_note_because_many_rows_need_it(
    blackwell: Machine, mixed: Path
) -> None:
    blackwell.measured_e4m3(mixed, "sm120", 2.0, theirs="wrong")
    found = blackwell.plan(mixed)
    assert reason(found, "nibble") == "vLLM's: vllm:e4m3:fp8: wrong"
    note = "vLLM's FP8 kernel failed on this machine, and many rows need it: vllm:e4m3:fp8: wrong"
    assert note in found.notices


def test_right_without_times_keeps_the_targets_choice(
    blackwell: Machine, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a self-test."""
    blackwell.measured_e4m3(mixed, "sm120", None)
    assert reason(blackwell.plan(mixed), "vllm") == "not measured here"
    (tmp_path / "h").mkdir()
    hopper = Machine(tmp_path / "h", monkeypatch, HOPPER)
    hopper.measured_e4m3(mixed, "hopper", None)
    assert reason(hopper.plan(mixed), "nibble") == BF16_ACTIVATIONS


def test_the_users_choice_and_obstacles_win_over_times(blackwell: Machine, mixed: Path) -> None:
    blackwell.measured_e4m3(mixed, "sm120", 0.5)
    named = blackwell.plan(mixed, "--linear-kernel", "vllm")
    assert reason(named, "vllm") == "set by the user" and not named.e4m3_kernels.uses
    invariant = blackwell.plan(mixed, VLLM_BATCH_INVARIANT="1")
    assert "depends on the number of rows" in reason(invariant, "vllm")
    assert not invariant.e4m3_kernels.uses


@ON_EACH
def test_a_start_tries_both_kernels_and_keeps_what_it_finds(
    machine: Machine, mixed: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: dict[str, Any] = {}
    slower = target == "gb10"

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        assert rest["work_s"] == 15.0
        tried.update((trial.name, trial) for trial in trials)
        return [
            Outcome(
                trial.name,
                "right",
                times={
                    shape_name(shape): {"1": 20.0 if ("vllm" in trial.name) != slower else 10.0}
                    for shape in trial.shapes
                },
            )
            for trial in trials
        ]

    monkeypatch.setattr(tune_module, "run_trials", run)
    monkeypatch.setattr(first_trials, "gpu_uses", lambda indices: [])
    before, said = machine.plan(mixed, NIBBLE_TRIALS="always"), list[str]()
    record = first_trials.should_try(before, machine.folder, print)
    assert record is not None
    first_trials.try_kernels(before, record, {}, said.append)
    assert "for linear layers and FP8 linear layers on this GPU" in said[0]
    for name in ("e4m3", "vllm:e4m3:fp8"):
        trial = tried[name]
        assert (trial.task, trial.device) == ("e4m3", "cuda") and trial.seconds_each <= 0.1
        assert trial.rows == trial.timed_rows == (1, 2, 4, 8)
        assert trial.shapes == ((128, 64), (64, 64))
    after = machine.plan(mixed, NIBBLE_TRIALS="always")
    assert first_trials.should_try(after, machine.folder, print) is None
    expected = ("vllm", "2.00") if slower else ("nibble", "0.50")
    assert f"takes {expected[1]} of vLLM's time" in reason(after, expected[0])


@pytest.mark.parametrize("shapes", [[], ["128x64:fp8", "64x64:fp8"]], ids=["model", "shapes"])
def test_tune_times_them_for_later_plans(
    blackwell: Machine, mixed: Path, monkeypatch: pytest.MonkeyPatch, shapes: list[str]
) -> None:
    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        def times(trial: Any) -> dict[str, dict[str, float]]:
            us = 10.0 if "vllm" in trial.name else 5.0
            return {shape_name(shape): {"1": us, "8": us} for shape in trial.shapes}

        return [Outcome(trial.name, "right", times=times(trial)) for trial in trials]

    monkeypatch.setattr(tune_module, "run_trials", run)
    monkeypatch.setattr(tune, "gpu_uses", lambda indices: [])
    monkeypatch.setattr(tune, "detect", lambda environ: blackwell.hardware)
    known = tune.place_of
    monkeypatch.setattr(tune, "place_of", lambda *a: known(*a, compiled="here"))
    environ = {"HF_HUB_OFFLINE": "1", "NIBBLE_CACHE_DIR": str(blackwell.folder)}
    found = tune.tune_model([str(mixed)], environ, shapes)
    names = {kernel["name"] for kernel in found["kernels"]}
    assert {"e4m3", "vllm:e4m3:fp8"} <= names and ("nibble" in names) == (not shapes)
    assert "takes 0.50 of vLLM's time" in reason(blackwell.plan(mixed), "nibble")
    for word in ("72x64:fp8-block", "128x64:fp9", "4x2x64x32x2:fp8"):
        with pytest.raises(NibbleError, match="--shape"):
            tune.tune_model([str(mixed)], environ, [word])


def test_shapes_of_fp8_layers_have_the_form_of_their_scales(tmp_path: Path) -> None:
    weights = mixed_tensors()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        rows = LINEAR_SHAPES[name][0]
        weights[f"model.layers.0.{name}.weight_scale"] = ("F32", [rows, 1])
    name = "model.layers.0.self_attn.o_proj"
    weights |= {f"{name}.weight": ("F8_E4M3", [256, 384])}
    del weights[f"{name}.weight_scale"]
    blocks: Tensors = {f"{name}.weight_scale_inv": ("F32", [2, 3])}

    def uses(tensors: Tensors, split: int = 1) -> tuple[Use, ...]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        found = read_checkpoint(str(write_checkpoint(folder, tensors, mixed_config())))
        return e4m3_uses(found, split)

    assert uses(weights | blocks) == (
        Use((128, 64), 1, "fp8-channel"),
        Use((256, 384), 1, "fp8-block"),
    )
    assert uses(weights | blocks, 2) == (
        Use((64, 64), 1, "fp8-channel"),
        Use((256, 192), 1, "fp8-block"),
    )
    others: Tensors = {f"{name}.weight_scale_inv": ("F32", [4, 6])}
    assert uses(weights | others) == (Use((128, 64), 1, "fp8-channel"),)
    assert uses(weights | blocks, 8)[-1:] == (Use((256, 48), 1, "fp8-block"),)  # 16 rows of q, k, v


def test_sizes_that_the_kernel_does_not_take_are_not_tried(tmp_path: Path) -> None:
    weights = mixed_tensors()
    weights["model.layers.0.self_attn.o_proj.weight"] = ("F8_E4M3", [64, 72])
    folder = write_checkpoint(tmp_path / "odd", weights, mixed_config())
    assert [use.shape for use in e4m3_uses(read_checkpoint(str(folder)), 1)] == [(128, 64)]
