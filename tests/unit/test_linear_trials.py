"""Plans and starts with results of trials: which kernel a model's shapes get on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.canary.kernels import expectations
from nibble.checkpoint import read_checkpoint
from nibble.engine.contract import Options
from nibble.machine.gpu_users import GpuUse
from nibble.machine.hardware import Hardware
from nibble.plan.linear_shapes import linear_uses
from nibble.plan.plan import Plan
from nibble.plan.w4a4_memory import linear_bytes
from nibble.serve import first_trials
from nibble.trials import tune as tune_module
from nibble.trials.catalog import OURS, OURS_FP4
from nibble.trials.trial import Outcome, Verdict, shape_name
from tests.support.hardware import HOPPER, SM120, SPARK
from tests.support.models.tiny_checkpoint import OTHER_FAMILY, linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4
from tests.support.tried_machine import Machine

FLAG = "--additional-config"
W4A4: dict[str, Any] = {"quantization_config": MODELOPT_NVFP4}
W4A16: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": ["lm_head"],
    }
}
GH200 = replace(HOPPER, gpus=(replace(HOPPER.gpus[0], name="NVIDIA GH200 480GB"),))


@pytest.fixture
def w4a16(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "w4a16", tensors("w4a16"), W4A16)


@pytest.fixture
def w4a4(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "w4a4", tensors("nvfp4"), W4A4)


def options(found: Plan) -> dict[str, Any]:
    kept = found.args[FLAG].value.get("nibble", {}) if FLAG in found.args else {}
    return {
        name: value for name, value in kept.items() if name not in ("step_graph", "attention_front")
    }


def first_shape(model: Path) -> str:
    return linear_uses(read_checkpoint(str(model)), 1, "bf16")[0].key.split()[0]


def test_where_no_kernel_of_nibbles_has_run_one_is_taken_only_after_trials(
    blackwell: Machine, w4a16: Path
) -> None:
    before = blackwell.plan(w4a16)
    assert options(before) == {} and "tries it on this machine" in (
        before.choices["linear_kernel"].reason
    )
    blackwell.measured(w4a16, "sm120")
    after = blackwell.plan(w4a16)
    assert options(after) == {"linear_kernel": "nibble"}
    assert after.choices["linear_kernel"].reason.startswith("measured on this machine: nibble's")
    shown = after.to_json()["linear_shapes"]
    assert shown and all(shape["kernel"] == "nibble" and shape["vllm_us"] for shape in shown)


def test_a_slower_shape_stays_vllms_and_both_kernels_are_expected(
    blackwell: Machine, w4a16: Path
) -> None:
    slow = first_shape(w4a16)
    blackwell.measured(w4a16, "sm120", {slow: 1.2})
    found = blackwell.plan(w4a16)
    assert options(found) == {"linear_kernel": "nibble", "vllm_shapes": slow}
    assert Options.from_config(found.args[FLAG].value).leaves_to_vllm(*map(int, slow.split("x")))
    allowed = next(want.allowed for want in expectations(found, {}) if want.part == "linear")
    assert {"NibbleNvFp4LinearKernel", "MarlinNvFp4LinearKernel"} <= set(allowed)
    blackwell.measured(w4a16, "sm120", 1.2)
    assert options(blackwell.plan(w4a16)) == {}


@pytest.mark.parametrize("verdict", ["wrong", "hung", "crashed", "not finite"])
def test_a_kernel_with_a_fault_is_named_and_not_used(
    hopper: Machine, w4a16: Path, verdict: Verdict
) -> None:
    hopper.measured(w4a16, "hopper", 0.1, {OURS: verdict})
    found = hopper.plan(w4a16)
    assert options(found) == {} and verdict in found.choices["linear_kernel"].reason


def test_a_fault_of_the_kernel_that_the_user_names_is_a_note(hopper: Machine, w4a16: Path) -> None:
    hopper.measured(w4a16, "hopper", 0.1, {OURS: "hung"})
    found = hopper.plan(w4a16, "--linear-kernel", "nibble")
    assert options(found) == {"linear_kernel": "nibble"}
    assert any("failed on this machine: nibble: hung" in note for note in found.notices)


def test_another_backend_of_vllms_replaces_its_wrong_choice(blackwell: Machine, w4a4: Path) -> None:
    """Where nibble's kernel has a fault too."""
    wrong: dict[str, Verdict] = {"vllm:auto:fp4": "wrong", "vllm:marlin:bf16": "right"}
    wrong |= {OURS_FP4: "hung"}
    blackwell.measured(w4a4, "sm120", 0.5, wrong, "fp4")
    found = blackwell.plan(w4a4)
    assert found.args["--linear-backend"].value == "marlin" and options(found) == {}
    assert any("vllm:auto:fp4: wrong" in note for note in found.notices)
    blackwell.measured(w4a4, "sm120", 0.5, {"vllm:marlin:bf16": "hung"}, "fp4")
    wrong |= {"vllm:marlin:bf16": "hung"}
    blackwell.measured(w4a4, "sm120", 0.5, wrong, "fp4")
    found = blackwell.plan(w4a4)
    assert "--linear-backend" not in found.args
    assert any("no other one can replace it" in note for note in found.notices)


def test_a_record_that_cannot_be_read_is_a_note_of_the_plan(
    blackwell: Machine, w4a16: Path
) -> None:
    blackwell.measured(w4a16, "sm120")
    path = blackwell.record("sm120").path
    assert path is not None
    path.write_text("{")
    found = blackwell.plan(w4a16)
    assert options(found) == {}
    assert [note for note in found.notices if note.startswith(f"dropped {path}")]


def test_results_of_one_machine_do_not_decide_for_several(blackwell: Machine, w4a16: Path) -> None:
    blackwell.measured(w4a16, "sm120")
    found = blackwell.plan(w4a16, HEAD_IP="10.0.0.1", NIBBLE_NNODES="2", TENSOR_PARALLEL_SIZE="2")
    assert options(found) == {} and not found.linear_kernels.uses


# --- the first start ---


def tries(machine: Machine, found: Plan) -> bool:
    return first_trials.should_try(found, machine.folder, print) is not None


def test_the_first_start_tries_and_later_ones_do_not(blackwell: Machine, w4a16: Path) -> None:
    assert tries(blackwell, blackwell.plan(w4a16))
    assert not tries(blackwell, blackwell.plan(w4a16, NIBBLE_TRIALS="off"))
    blackwell.measured(w4a16, "sm120")
    assert not tries(blackwell, blackwell.plan(w4a16))


def test_a_fault_is_not_tried_again(blackwell: Machine, w4a16: Path) -> None:
    outcomes = [Outcome(OURS, "hung"), Outcome("vllm:auto:bf16", "right")]
    blackwell.record("sm120").with_outcomes(outcomes).save(print)
    assert not tries(blackwell, blackwell.plan(w4a16))


def test_gpus_that_nibble_was_measured_on_are_not_tried_unless_asked(
    hopper: Machine, w4a16: Path
) -> None:
    assert not tries(hopper, hopper.plan(w4a16))
    assert tries(hopper, hopper.plan(w4a16, NIBBLE_TRIALS="always"))


def test_another_hopper_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, w4a16: Path
) -> None:
    machine = Machine(tmp_path, monkeypatch, GH200)
    found = machine.plan(w4a16)
    assert tries(machine, found) and options(found) == {"linear_kernel": "nibble"}


def test_vllms_kernel_alone_is_tried_where_nibbles_cannot_serve(b200: Machine, w4a4: Path) -> None:
    """Its FP4 products nibble's kernels do not have."""
    kernels = b200.plan(w4a4).linear_kernels
    assert kernels.uses and not kernels.tries_ours and not kernels.is_timed
    named = b200.plan(w4a4, VLLM_EXTRA_ARGS="--linear-backend marlin").linear_kernels
    assert not named.uses


def test_shapes_of_layers_divide_over_gpus() -> None:
    found = read_checkpoint("models/nibble-demo-nvfp4")
    whole = {use.shape: use.layers for use in linear_uses(found, 1, "fp4")}
    assert whole == {(1536, 256): 4, (256, 768): 4, (512, 256): 4, (256, 256): 4}
    halves = {use.shape: use.layers for use in linear_uses(found, 2, "fp4")}
    assert halves == {(768, 256): 4, (256, 384): 4, (256, 256): 4, (256, 128): 4}


@pytest.mark.parametrize("value", ["4096", "4096x", "4096x4096,", "1x1;", "axb", 5])
def test_shapes_of_the_plugins_options_are_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="vllm_shapes"):
        Options.from_config({"nibble": {"vllm_shapes": value}})


def test_a_first_start_keeps_what_it_measured_and_names_a_fault(
    blackwell: Machine, w4a16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: dict[str, Verdict] = {}

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        assert rest["work_s"] == 15.0 and all(trial.device == "cuda" for trial in trials)
        return [
            Outcome(
                trial.name,
                verdicts.get(trial.name, "right"),
                ran="Marlin" if trial.name != OURS else "nibble",
                times={
                    shape_name(shape): {"1": 5.0 if trial.name == OURS else 10.0}
                    for shape in trial.shapes
                },
            )
            for trial in trials
        ]

    monkeypatch.setattr(tune_module, "run_trials", run)
    uses = [GpuUse(0, 1, 5 << 30, 90)]
    monkeypatch.setattr(first_trials, "gpu_uses", lambda indices: uses)
    before = blackwell.plan(w4a16)
    record = first_trials.should_try(before, blackwell.folder, print)
    assert record is not None
    said: list[str] = []
    first_trials.try_kernels(before, record, {}, said.append)
    assert "GPU 0 is in use: 1 process, 5.0 GiB, 90 % busy: a start on an idle GPU" in said[1]
    assert tries(blackwell, blackwell.plan(w4a16)) and not blackwell.record("sm120").shapes
    uses.clear()
    said.clear()
    verdicts[OURS] = "hung"
    first_trials.try_kernels(before, record, {}, said.append)
    assert said[0].startswith(
        "trying nibble's and vLLM's kernels for linear layers on this GPU, once"
    )
    assert said[1:] == ["nibble: hung"]
    after = blackwell.plan(w4a16)
    assert options(after) == {} and "is not used: nibble: hung" in (
        after.choices["linear_kernel"].reason
    )
    verdicts.clear()
    first_trials.try_kernels(before, record, {}, said.append)
    assert options(blackwell.plan(w4a16)) == {"linear_kernel": "nibble"} and len(said) == 3


def test_another_kernel_of_vllms_is_tried_after_a_fault_of_its_choice(
    b200: Machine, w4a4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        tried.extend(trial.name for trial in trials)
        return [
            Outcome(trial.name, "crashed" if "auto" in trial.name else "right") for trial in trials
        ]

    for module in (tune_module, first_trials):
        monkeypatch.setattr(module, "run_trials", run)
    monkeypatch.setattr(first_trials, "gpu_uses", lambda indices: [])
    before = b200.plan(w4a4)
    record = first_trials.should_try(before, b200.folder, print)
    assert record is not None
    first_trials.try_kernels(before, record, {}, print)
    cutedsl = [f"vllm:flashinfer_cutedsl:{form}" for form in ("fp4", "bf16")]
    assert tried == ["vllm:auto:fp4", *cutedsl, "vllm:flashinfer_cutlass:fp4"]
    assert b200.plan(w4a4).args["--linear-backend"].value == "flashinfer_cutedsl"


# --- W4A4 on GPUs whose FP4 products nibble's kernels have ---


def why(found: Plan) -> str:
    return found.choices["linear_kernel"].reason


@pytest.mark.parametrize(("hardware", "target"), [(SM120, "sm120"), (SPARK, "gb10")])
def test_w4a4_layers_get_nibbles_kernel_only_after_trials_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, w4a4: Path, hardware: Hardware, target: str
) -> None:
    machine = Machine(tmp_path, monkeypatch, hardware)
    before = machine.plan(w4a4)
    assert options(before) == {} and "tries it on this machine" in why(before)
    assert before.linear_kernels.tries_ours and before.linear_kernels.is_timed
    machine.measured(w4a4, target, 0.5, form="fp4")
    after = machine.plan(w4a4)
    assert options(after) == {"linear_kernel": "nibble"}
    assert why(after).startswith("measured on this machine: nibble's for")
    assert not tries(machine, after)
    machine.measured(w4a4, target, 1.2, form="fp4")
    assert options(machine.plan(w4a4)) == {}


def test_a_slower_w4a4_shape_stays_vllms(blackwell: Machine, w4a4: Path) -> None:
    slow = first_shape(w4a4)
    blackwell.measured(w4a4, "sm120", {slow: 1.2}, form="fp4")
    found = blackwell.plan(w4a4)
    assert options(found) == {"linear_kernel": "nibble", "vllm_shapes": slow}
    (want,) = (want for want in expectations(found, {}) if want.part == "linear")
    assert want.allowed[0] == "NibbleNvFp4W4A4LinearKernel"
    assert "MarlinNvFp4LinearKernel" in want.allowed


def test_the_times_of_another_format_of_activations_do_not_count(
    blackwell: Machine, w4a4: Path
) -> None:
    """Nor the verdict of the kernel that leaves activations in BF16."""
    blackwell.measured(w4a4, "sm120", 0.5, {"vllm:auto:fp4": "right"}, form="bf16")
    assert options(blackwell.plan(w4a4)) == {}
    bf16 = blackwell.plan(w4a4, "--nvfp4-activations", "bf16")
    assert options(bf16) == {"linear_kernel": "nibble", "nvfp4_activations": "bf16"}


@pytest.mark.parametrize("name", [OURS_FP4, "w4a4", "quantize", "conversions"])
@pytest.mark.parametrize("verdict", ["wrong", "crashed"])
def test_a_fault_of_the_w4a4_kernel_or_of_a_part_is_named(
    blackwell: Machine, w4a4: Path, name: str, verdict: Verdict
) -> None:
    blackwell.measured(w4a4, "sm120", 0.1, {name: verdict}, form="fp4")
    found = blackwell.plan(w4a4)
    assert options(found) == {} and f"{name}: {verdict}" in why(found)
    named = blackwell.plan(w4a4, "--linear-kernel", "nibble")
    assert options(named) == {"linear_kernel": "nibble"}
    assert any(f"failed on this machine: {name}: {verdict}" in note for note in named.notices)


def test_a_fault_of_the_bf16_kernels_alone_does_not_count(blackwell: Machine, w4a4: Path) -> None:
    blackwell.measured(w4a4, "sm120", 0.5, {"decode": "wrong", OURS: "hung"}, form="fp4")
    assert options(blackwell.plan(w4a4)) == {"linear_kernel": "nibble"}


def test_nibbles_w4a4_kernel_replaces_one_of_vllms_that_is_wrong(
    blackwell: Machine, w4a4: Path
) -> None:
    blackwell.measured(w4a4, "sm120", 2.0, {"vllm:auto:fp4": "wrong"}, form="fp4")
    assert options(blackwell.plan(w4a4)) == {"linear_kernel": "nibble"}


def test_the_first_start_tries_the_w4a4_kernel_beside_vllms(
    blackwell: Machine, w4a4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        tried.extend(trials)
        return [
            Outcome(
                trial.name,
                "right",
                times={
                    shape_name(shape): {"1": 10.0 if "vllm" in trial.name else 5.0}
                    for shape in trial.shapes
                },
            )
            for trial in trials
        ]

    monkeypatch.setattr(tune_module, "run_trials", run)
    monkeypatch.setattr(first_trials, "gpu_uses", lambda indices: [])
    before = blackwell.plan(w4a4)
    record = first_trials.should_try(before, blackwell.folder, print)
    assert record is not None
    first_trials.try_kernels(before, record, {}, print)
    assert [(trial.name, trial.kernel) for trial in tried] == [
        (name, name) for name in ("nibble:fp4", "vllm:auto:fp4")
    ]
    assert tried[0].timed_rows == (1, 2, 4, 8, 16, 32, 64, 2048)
    assert set(tried[0].rows) >= {1, 16, 17, 64, 200, 1100}
    assert options(blackwell.plan(w4a4)) == {"linear_kernel": "nibble"}


def test_what_keeps_auto_from_the_w4a4_kernel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, w4a4: Path
) -> None:
    machine = Machine(tmp_path, monkeypatch, SPARK)
    weights = tensors("nvfp4") | linear("model.layers.0.mlp.down_proj", 64, 48, "nvfp4")
    odd = write_checkpoint(tmp_path / "odd", weights, W4A4 | OTHER_FAMILY)
    names = [name.removesuffix(".weight_scale") for name in tensors("nvfp4") if "_scale" in name]
    layers = {
        name: {"quant_algo": "W4A16_NVFP4" if "o_proj" in name else "NVFP4", "group_size": 16}
        for name in names
    }
    mixed_config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = {"quantization_config": {"quant_method": "modelopt", **mixed_config}}
    mixed = write_checkpoint(tmp_path / "mixed", tensors("nvfp4"), config)
    for model, environ, reason in (
        (odd, {}, "a layer of 64x48 on a GPU has columns that are not a multiple of 32"),
        (w4a4, {"VLLM_BATCH_INVARIANT": "1"}, "the order of nibble's W4A4 sums depends"),
        (mixed, {}, "some layers have activations in FP4 and others in BF16"),
    ):
        machine.measured(model, "gb10", 0.1, form="fp4")
        found = machine.plan(model, **environ)
        assert options(found) == {} and reason in why(found)
        assert not found.linear_kernels.tries_ours


def test_quartet_ii_has_no_trials_of_the_w4a4_kernel(blackwell: Machine, tmp_path: Path) -> None:
    config = {"model_type": "cloverlm", "architectures": ["CloverLMForCausalLM"]}
    folder = write_checkpoint(tmp_path / "quartet2", tensors("quartet2"), config)
    (folder / "a.vocab").touch()
    assert not blackwell.plan(folder).linear_kernels.tries_ours


def test_the_workspace_of_the_w4a4_kernel_is_in_the_budget(blackwell: Machine, w4a4: Path) -> None:
    def workspace(*words: str) -> int:
        return blackwell.plan(w4a4, *words).budget.workspace_bytes

    tokens = ("--max-num-batched-tokens", "4096")
    more = workspace("--linear-kernel", "nibble", *tokens) - workspace(*tokens)
    shapes = [use.shape for use in linear_uses(read_checkpoint(str(w4a4)), 1, "fp4")]
    assert more == max(linear_bytes(shape, 4096, 188) for shape in shapes) > 188 * 65536
    bf16 = ("--nvfp4-activations", "bf16", *tokens)
    assert workspace("--linear-kernel", "nibble", *bf16) == workspace(*bf16)
