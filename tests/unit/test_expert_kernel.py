"""NIBBLE_MOE_KERNEL: what a plan takes for experts without trials and after them, what it refuses,
and the memory that nibble's kernel takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.canary.kernels import expectations
from nibble.checkpoint import read_checkpoint
from nibble.cli import tune
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Hardware
from nibble.plan.expert_memory import dequantized_bytes, e4m3_bytes, tiles_bytes
from nibble.plan.expert_shapes import expert_uses
from nibble.plan.plan import Plan
from nibble.plan.w4a4_memory import expert_bytes
from nibble.serve import first_trials
from nibble.trials.trial import Outcome, Verdict
from tests.support.hardware import SM120, SPARK
from tests.support.models.generated_hybrid import HybridShape
from tests.support.models.generated_nvfp4 import write_checkpoint as write_generated
from tests.support.models.tiny_checkpoint import OTHER_FAMILY, linear, stacked, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4
from tests.support.tried_machine import Machine

FLAG = "--additional-config"
W4A16 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
MOE = OTHER_FAMILY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_experts(folder: Path, form: str = "w4a16", gated: bool = True) -> Path:
    """One layer of four experts, 64 by 32."""
    weights: dict[str, Any] = {
        "model.embed_tokens.weight": ("BF16", [128, 64]),
        "lm_head.weight": ("BF16", [128, 64]),
    }
    first = ("gate_proj", "up_proj") if gated else ("up_proj",)
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}"
        for part in first:
            weights |= linear(f"{name}.{part}", 32, 64, form)
        weights |= linear(f"{name}.down_proj", 64, 32, form)
    config = {"w4a16": W4A16, "fp8": FP8}.get(form, MODELOPT_NVFP4)
    return write_checkpoint(folder, weights, MOE | {"quantization_config": config})


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return write_experts(tmp_path / "experts")


def kernel(found: Plan) -> str:
    options = found.args[FLAG].value.get("nibble", {}) if FLAG in found.args else {}
    assert found.choices["moe_kernel"].value == options.get("moe_kernel", "vllm")
    return options.get("moe_kernel", "vllm")


def why(found: Plan) -> str:
    return found.choices["moe_kernel"].reason


def test_without_trials_experts_are_vllms_on_every_target(
    blackwell: Machine, experts: Path
) -> None:
    found = blackwell.plan(experts)
    assert kernel(found) == "vllm" and "have not been measured in a server" in why(found)
    assert "tries it on this machine" in why(found)


def test_the_faster_kernel_of_this_machine_is_taken(blackwell: Machine, experts: Path) -> None:
    blackwell.measured_experts(experts, "sm120", 0.8)
    found = blackwell.plan(experts)
    assert kernel(found) == "nibble"
    assert why(found) == (
        "measured on this machine: nibble's for 1 of 1 shapes (0.80 to 0.80 of vLLM's time)"
    )
    shown = found.to_json()["expert_shapes"]
    assert [shape["shape"] for shape in shown] == ["4x2x64x32x2"]
    allowed = next(want.allowed for want in expectations(found, {}) if want.part == "moe")
    assert allowed[:2] == ("NibbleModelOptNvFp4MoE", "NibbleCompressedTensorsNvFp4MoE")
    blackwell.measured_experts(experts, "sm120", 1.1)
    assert kernel(blackwell.plan(experts)) == "vllm" and "(1.10)" in why(blackwell.plan(experts))


@pytest.mark.parametrize("verdict", ["wrong", "hung", "crashed", "not finite"])
def test_a_fault_is_named_and_the_kernel_not_used(
    blackwell: Machine, experts: Path, verdict: Verdict
) -> None:
    blackwell.measured_experts(experts, "sm120", 0.1, ours=verdict)
    found = blackwell.plan(experts)
    assert kernel(found) == "vllm" and f"experts: {verdict}" in why(found)
    named = blackwell.plan(experts, "--moe-kernel", "nibble")
    assert kernel(named) == "nibble"
    assert any(f"experts failed on this machine: experts: {verdict}" in n for n in named.notices)


def test_a_kernel_that_is_not_for_this_machine_leaves_vllms(
    blackwell: Machine, experts: Path
) -> None:
    blackwell.measured_experts(experts, "sm120", None, ours="refused")
    assert kernel(blackwell.plan(experts)) == "vllm"


def test_nibbles_replaces_one_of_vllms_that_is_wrong_here(
    blackwell: Machine, experts: Path
) -> None:
    blackwell.measured_experts(experts, "sm120", None, vllm="crashed")
    found = blackwell.plan(experts)
    assert kernel(found) == "nibble" and "nibble's for 1 of 1 shapes" in why(found)


def test_a_first_start_tries_experts_where_nibble_ships_no_measurements(
    blackwell: Machine, experts: Path
) -> None:
    def tries(found: Plan) -> bool:
        return first_trials.should_try(found, blackwell.folder, print) is not None

    assert tries(blackwell.plan(experts))
    assert not tries(blackwell.plan(experts, NIBBLE_TRIALS="off"))
    blackwell.measured_experts(experts, "sm120")
    assert not tries(blackwell.plan(experts))


def test_a_first_start_keeps_what_it_measured(
    blackwell: Machine, experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        asked.extend(trials)
        return [
            Outcome(
                trial.name,
                "right",
                times={
                    "x".join(map(str, shape)): {"1": 5.0 if trial.name == "experts" else 10.0}
                    for shape in trial.shapes
                },
            )
            for trial in trials
        ]

    monkeypatch.setattr("nibble.trials.tune.run_trials", run)
    monkeypatch.setattr(first_trials, "gpu_uses", lambda indices: [])
    before, said = blackwell.plan(experts), list[str]()
    record = first_trials.should_try(before, blackwell.folder, print)
    assert record is not None
    first_trials.try_kernels(before, record, {}, said.append)
    assert said[0].startswith("trying nibble's and vLLM's kernels for experts on this GPU, once")
    assert [(trial.name, trial.task) for trial in asked] == [
        ("experts", "experts"),
        ("vllm:experts:bf16", "experts"),
    ]
    assert kernel(blackwell.plan(experts)) == "nibble"


def test_on_hopper_they_are_the_default(hopper: Machine, experts: Path) -> None:
    found = hopper.plan(experts)
    assert kernel(found) == "nibble" and "faster than vLLM's in a server" in why(found)
    assert kernel(hopper.plan(experts, "--moe-kernel", "vllm")) == "vllm"
    assert kernel(hopper.plan(experts, "--enable-lora")) == "vllm"
    hopper.measured_experts(experts, "hopper", None, ours="hung")
    found = hopper.plan(experts)
    assert kernel(found) == "vllm" and "experts: hung" in why(found)


@pytest.mark.parametrize("words", [(), ("--shape",)])
def test_tune_times_experts_for_later_plans(
    blackwell: Machine,
    experts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        times = {"experts": {"1": 5.0, "16": 8.0}, "vllm:experts:bf16": {"1": 10.0, "16": 10.0}}
        names = ["x".join(map(str, shape)) for shape in trials[0].shapes]
        return [
            Outcome(trial.name, "right", times=dict.fromkeys(names, times[trial.name]))
            for trial in trials
        ]

    monkeypatch.setattr("nibble.trials.tune.run_trials", run)
    monkeypatch.setattr(tune, "gpu_uses", lambda indices: [])
    monkeypatch.setattr(tune, "detect", lambda environ: blackwell.hardware)
    known = tune.place_of
    monkeypatch.setattr(tune, "place_of", lambda *a: known(*a, compiled="here"))
    environ = {"HF_HUB_OFFLINE": "1", "NIBBLE_CACHE_DIR": str(blackwell.folder)}
    shapes = ["4x2x64x32x2"] if words else []
    found = tune.tune_model([str(experts)], environ, shapes)
    assert [(shape["shape"], shape["kernel"]) for shape in found["shapes"]] == [
        ("4x2x64x32x2", "nibble")
    ]
    assert found["shapes"][0]["vllm_us"] == {"1": 10.0, "16": 10.0}
    tune.show_tuned(found)
    assert "5.0 / 10.0" in capsys.readouterr().out
    assert kernel(blackwell.plan(experts)) == "nibble"


@pytest.mark.parametrize(
    ("words", "environ", "reason"),
    [
        (["--enable-expert-parallel", "--enable-eplb"], {}, "only vLLM's kernels have experts"),
        (["--enable-lora"], {}, "only vLLM's kernels have adapters"),
        (["--moe-backend", "marlin"], {}, "--moe-backend marlin names another kernel"),
        ([], {"VLLM_BATCH_INVARIANT": "1"}, "depend on the number of tokens"),
        (["--dtype", "float16"], {}, "need BF16 activations"),
    ],
)
def test_what_keeps_auto_with_vllm(
    blackwell: Machine, experts: Path, words: list[str], environ: dict[str, str], reason: str
) -> None:
    blackwell.measured_experts(experts, "sm120")
    found = blackwell.plan(experts, *words, **environ)
    assert kernel(found) == "vllm" and reason in why(found)
    assert not found.expert_kernels.uses


@pytest.mark.parametrize("flag", ["--enable-eplb", "--enable-lora"])
def test_nibbles_kernel_with_a_flag_that_it_cannot_serve_is_refused(
    hopper: Machine, experts: Path, flag: str
) -> None:
    words = ["--moe-kernel", "nibble", "--enable-expert-parallel", flag]
    with pytest.raises(NibbleError) as refused:
        hopper.plan(experts, *words)
    assert refused.value.code is ExitCode.CONFIG
    assert refused.value.line().startswith(f"{flag} and NIBBLE_MOE_KERNEL=nibble are both set")


def test_fp4_products_that_nibble_has_not_stay_with_vllm(b200: Machine, tmp_path: Path) -> None:
    found = b200.plan(write_experts(tmp_path / "w4a4", "nvfp4"))
    assert kernel(found) == "vllm" and "multiplies FP4 activations" in why(found)
    assert not found.expert_kernels.uses


def shapes(model: Path, **flags: Any) -> list[str]:
    args = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return [use.key for use in expert_uses(read_checkpoint(str(model)), args, "bf16")]


def test_shapes_of_experts_on_one_gpu(experts: Path, tmp_path: Path) -> None:
    assert shapes(experts) == ["4x2x64x32x2 bf16"]
    assert shapes(experts, tensor_parallel_size=2) == ["4x2x64x16x2 bf16"]
    assert shapes(experts, tensor_parallel_size=4) == []  # 8 columns are half a group
    both = {"enable_expert_parallel": True, "tensor_parallel_size": 2, "data_parallel_size": 2}
    assert shapes(experts, **both) == ["1x1x64x32x2 bf16"]
    assert shapes(write_experts(tmp_path / "up", gated=False)) == ["4x2x64x32x1 bf16"]
    layer = "model.layers.0.mlp.experts"
    weights = stacked(f"{layer}.gate_up_proj", 4, 64, 64) | stacked(f"{layer}.down_proj", 4, 64, 32)
    config = MOE | {"quantization_config": W4A16}
    assert shapes(write_checkpoint(tmp_path / "stacked", weights, config)) == ["4x2x64x32x2 bf16"]


# --- E4M3 experts ---


def test_e4m3_experts_get_nibbles_kernel_only_by_name(hopper: Machine, tmp_path: Path) -> None:
    model = write_experts(tmp_path / "fp8", "fp8")
    found = hopper.plan(model)
    assert "moe_kernel" not in found.choices
    assert "moe_kernel" not in found.args[FLAG].value["nibble"]
    assert not found.expert_kernels.uses
    ours = hopper.plan(model, "--moe-kernel", "nibble")
    assert kernel(ours) == "nibble"
    (moe,) = (want for want in expectations(ours, {}) if want.part == "moe")
    assert "NibbleFp8MoE" in moe.allowed
    workspace = ours.budget.workspace_bytes - found.budget.workspace_bytes
    assert workspace == e4m3_bytes((4, 2, 64, 32, 2), 8192)


def test_auto_leaves_a_mixed_model_with_e4m3_experts_to_vllm(
    blackwell: Machine, experts: Path, tmp_path: Path
) -> None:
    """Though nibble's NVFP4 experts were the faster here: one setting is for both."""
    blackwell.measured_experts(experts, "sm120")
    weights: dict[str, Any] = {"model.embed_tokens.weight": ("BF16", [128, 64])}
    layers = {}
    for layer, form in enumerate(("w4a16", "fp8")):
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            for part, rows, columns in (
                ("gate_proj", 32, 64),
                ("up_proj", 32, 64),
                ("down_proj", 64, 32),
            ):
                weights |= linear(f"{name}.{part}", rows, columns, form)
                algorithm = "FP8" if form == "fp8" else "W4A16_NVFP4"
                layers[f"{name}.{part}"] = {"quant_algo": algorithm, "group_size": 16}
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    config = MOE | {"num_hidden_layers": 2, "quantization_config": mixed}
    found = blackwell.plan(write_checkpoint(tmp_path / "mixed", weights, config))
    assert kernel(found) == "vllm" and "E4M3 experts is slower" in why(found)
    assert not found.expert_kernels.uses


def test_mxfp8_experts_have_no_kernel_of_nibbles(hopper: Machine, tmp_path: Path) -> None:
    weights: dict[str, Any] = {"model.embed_tokens.weight": ("BF16", [128, 64])}
    for expert in range(4):
        for part, rows, columns in (("up_proj", 32, 64), ("down_proj", 64, 32)):
            name = f"model.layers.0.mlp.experts.{expert}.{part}"
            weights[f"{name}.weight"] = ("F8_E4M3", [rows, columns])
            weights[f"{name}.weight_scale"] = ("U8", [rows, columns // 32])
    config = MOE | {"quantization_config": FP8 | {"quant_algo": "MXFP8"}}
    model = write_checkpoint(tmp_path / "mxfp8", weights, config)
    with pytest.raises(NibbleError, match="needs an NVFP4 checkpoint or E4M3 experts"):
        hopper.plan(model, "--moe-kernel", "nibble")


def test_e4m3_experts_with_eplb_are_refused(hopper: Machine, tmp_path: Path) -> None:
    model = write_experts(tmp_path / "fp8", "fp8")
    words = ["--moe-kernel", "nibble", "--enable-expert-parallel", "--enable-eplb"]
    with pytest.raises(NibbleError, match="--enable-eplb and NIBBLE_MOE_KERNEL=nibble"):
        hopper.plan(model, *words)


# --- W4A4 on GPUs whose FP4 products nibble's kernels have ---


@pytest.fixture
def w4a4(tmp_path: Path) -> Path:
    return write_experts(tmp_path / "w4a4", "nvfp4")


@pytest.mark.parametrize(("hardware", "target"), [(SM120, "sm120"), (SPARK, "gb10")])
def test_w4a4_experts_are_nibbles_only_after_trials_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, w4a4: Path, hardware: Hardware, target: str
) -> None:
    machine = Machine(tmp_path, monkeypatch, hardware)
    before = machine.plan(w4a4)
    assert kernel(before) == "vllm" and "tries it on this machine" in why(before)
    assert before.expert_kernels.tries_ours and before.expert_kernels.is_timed
    machine.measured_experts(w4a4, target, 0.8, form="fp4")
    found = machine.plan(w4a4)
    assert kernel(found) == "nibble" and why(found).startswith("measured on this machine")
    (want,) = (want for want in expectations(found, {}) if want.part == "moe")
    assert want.allowed[:2] == ("NibbleModelOptW4A4MoE", "NibbleCompressedTensorsW4A4MoE")
    machine.measured_experts(w4a4, target, 1.1, form="fp4")
    assert kernel(machine.plan(w4a4)) == "vllm"


def test_trials_of_the_bf16_experts_say_nothing_of_w4a4_ones(
    blackwell: Machine, w4a4: Path
) -> None:
    blackwell.measured_experts(w4a4, "sm120", 0.5, form="bf16")
    assert kernel(blackwell.plan(w4a4)) == "vllm"
    assert kernel(blackwell.plan(w4a4, "--nvfp4-activations", "bf16")) == "nibble"


@pytest.mark.parametrize("name", ["w4a4-experts", "quantize", "conversions"])
def test_a_fault_of_the_w4a4_experts_or_of_a_part_is_named(
    blackwell: Machine, w4a4: Path, name: str
) -> None:
    blackwell.measured_experts(w4a4, "sm120", 0.1, form="fp4")
    record = blackwell.record("sm120").with_outcomes([Outcome(name, "wrong")])
    record.save(print)
    found = blackwell.plan(w4a4)
    assert kernel(found) == "vllm" and f"{name}: wrong" in why(found)


def test_nibbles_w4a4_experts_replace_those_of_vllms_that_are_wrong(
    blackwell: Machine, w4a4: Path
) -> None:
    blackwell.measured_experts(w4a4, "sm120", None, form="fp4", vllm="crashed")
    assert kernel(blackwell.plan(w4a4)) == "nibble"


def test_a_first_start_tries_the_w4a4_experts_beside_vllms(
    blackwell: Machine, w4a4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        asked.extend(trial.name for trial in trials)
        return [Outcome(trial.name, "right") for trial in trials]

    monkeypatch.setattr("nibble.trials.tune.run_trials", run)
    monkeypatch.setattr(first_trials, "gpu_uses", lambda indices: [])
    record = first_trials.should_try(before := blackwell.plan(w4a4), blackwell.folder, print)
    assert record is not None
    first_trials.try_kernels(before, record, {}, print)
    assert asked == ["w4a4-experts", "vllm:experts:fp4"]


@pytest.mark.parametrize(
    ("form", "ours"), [("", ("experts", "nibble")), (":fp4", ("w4a4-experts", "nibble:fp4"))]
)
def test_tune_times_the_kernels_of_the_format_of_activations(
    blackwell: Machine, monkeypatch: pytest.MonkeyPatch, form: str, ours: tuple[str, str]
) -> None:
    asked: list[str] = []

    def run(trials: Any, environ: Any, **rest: Any) -> list[Outcome]:
        asked.extend(trial.name for trial in trials)
        return [Outcome(trial.name, "right") for trial in trials]

    monkeypatch.setattr("nibble.trials.tune.run_trials", run)
    monkeypatch.setattr(tune, "gpu_uses", lambda indices: [])
    monkeypatch.setattr(tune, "detect", lambda environ: blackwell.hardware)
    environ = {"HF_HUB_OFFLINE": "1", "NIBBLE_CACHE_DIR": str(blackwell.folder)}
    shapes = [f"4x2x64x32x2{form}", f"4096x4096{form}"]
    tune.tune_model([], environ, shapes)
    kind = form.removeprefix(":") or "bf16"
    assert sorted(asked) == sorted([*ours, f"vllm:auto:{kind}", f"vllm:experts:{kind}"])
    if form:
        with pytest.raises(NibbleError, match="columns that are one of 32"):
            tune.tune_model([], environ, ["4096x4112:fp4"])


def test_the_workspace_of_w4a4_experts_is_in_the_budget(blackwell: Machine, w4a4: Path) -> None:
    theirs = blackwell.plan(w4a4).budget.workspace_bytes
    ours = blackwell.plan(w4a4, "--moe-kernel", "nibble").budget.workspace_bytes
    assert ours - theirs == expert_bytes((4, 2, 64, 32, 2), 8192, 188) > 0


# --- memory ---


def test_the_workspace_is_in_the_budget(hopper: Machine, experts: Path) -> None:
    words = ["--max-num-batched-tokens", "4096"]
    theirs = hopper.plan(experts, "--moe-kernel", "vllm", *words).budget.workspace_bytes
    ours = hopper.plan(experts, "--moe-kernel", "nibble", *words).budget.workspace_bytes
    assert ours - theirs == tiles_bytes((4, 2, 64, 32, 2), 4096) > 0


def test_the_workspace_counts_a_shared_expert_as_one_more_of_each_token(
    hopper: Machine, tmp_path: Path
) -> None:
    shape = HybridShape(layers=4, hidden=64, intermediate=32, experts=4, chosen=2)
    folder = write_generated(tmp_path / "hybrid", shape, "modelopt")
    words = ["--max-num-batched-tokens", "4096"]
    theirs = hopper.plan(folder, "--moe-kernel", "vllm", *words).budget.workspace_bytes
    for switch, shape_of_kernel in (("off", (4, 2, 64, 32, 2)), ("on", (5, 3, 64, 32, 2))):
        ours = hopper.plan(
            folder, "--moe-kernel", "nibble", "--shared-expert", switch, *words
        ).budget.workspace_bytes
        assert ours - theirs == tiles_bytes(shape_of_kernel, 4096)


def test_other_gpus_have_the_larger_weight_of_all_experts_in_bf16(
    blackwell: Machine, experts: Path
) -> None:
    theirs = blackwell.plan(experts).budget.workspace_bytes
    ours = blackwell.plan(experts, "--moe-kernel", "nibble").budget.workspace_bytes
    assert ours - theirs == dequantized_bytes((4, 2, 64, 32, 2), 8192)
    assert dequantized_bytes((128, 8, 2048, 768, 2), 1) > 128 * 1536 * 2048 * 2
