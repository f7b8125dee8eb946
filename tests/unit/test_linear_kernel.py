"""NIBBLE_LINEAR_KERNEL=auto: whose kernel multiplies NVFP4 weights in a plan, and why."""

from __future__ import annotations

import importlib.metadata
import json
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from nibble.canary.kernels import expectations
from nibble.engine import installed
from nibble.errors import NibbleError
from nibble.machine.hardware import Gpu, Hardware
from nibble.machine.paths import root
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.linear_kernel import FOR_ALL_ROWS
from nibble.plan.plan import Plan
from nibble.serve.preflight.nvfp4 import check_plugin
from tests.support.models.tiny_checkpoint import OTHER_FAMILY, linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4

FLAG = "--additional-config"
BY_DEFAULT = {"step_graph": "on", "attention_front": "on"}
OURS = {"nibble": {"linear_kernel": "nibble", **BY_DEFAULT}}
W4A4: dict[str, Any] = {"quantization_config": MODELOPT_NVFP4}
W4A16: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": ["lm_head"],
    }
}
THEIRS = ("marlin", "humming")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", tensors("nvfp4"), W4A4)


def plan(model: Path | str, *words: str, target: str = "hopper", **environ: str) -> Plan:
    given = {"MAX_NUM_SEQS": "4", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent"} | environ
    return plan_for(read_wishes([str(model), "--target", target, *words], given))


def reason(found: Plan, kernel: str) -> str:
    """Why it is that kernel, of a plan that tells vLLM so."""
    told = found.args[FLAG].value.get("nibble", {}) if FLAG in found.args else {}
    assert told.get("linear_kernel", "vllm") == found.choices["linear_kernel"].value == kernel
    return found.choices["linear_kernel"].reason


@pytest.mark.parametrize("sequences", ["1", "16", "17", "256", ""])
def test_by_default_hopper_takes_nibbles_kernel_for_any_number_of_sequences(
    model: Path, sequences: str
) -> None:
    found = plan(model, MAX_NUM_SEQS=sequences)
    assert found.args[FLAG].value == OURS
    assert reason(found, "nibble") == FOR_ALL_ROWS
    assert plan(model, NIBBLE_LINEAR_KERNEL="auto").args[FLAG].value == OURS


def test_the_reason_names_a_page_that_says_so() -> None:
    page = re.findall(r"docs/\S+\.md", FOR_ALL_ROWS)[0]
    assert "any number of rows" in (root() / page).read_text()


def test_nibbles_kernel_was_the_fastest_for_few_rows_and_on_average_for_many() -> None:
    """Figures from before the warpgroup kernel say nothing about more than 16 rows."""
    measured = json.loads((root() / "benchmarks/results/nvfp4_linear_h200.json").read_text())
    ratios: dict[int, list[float]] = {}
    for one in measured["results"]:
        fastest = min(one["us"][name] for name in THEIRS)
        ratios.setdefault(one["rows"], []).append(fastest / one["us"]["nibble"])
    assert all(min(found) > 1 for rows, found in ratios.items() if rows <= 16)
    if measured["machine"]["date"] >= "2026-11-25":
        assert all(geometric_mean(found) > 1 for rows, found in ratios.items() if rows <= 64)


@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        ("w4a16", W4A16, ()),
        ("nvfp4", W4A4, ("--nvfp4-activations", "bf16")),
        ("nvfp4", W4A4 | EXPERTS, ()),
        ("nvfp4", W4A4, ("--enable-lora",)),
    ],
    ids=["W4A16", "BF16 activations", "dense part of a mixture of experts", "with adapters"],
)
def test_every_nvfp4_checkpoint_is_weight_only_on_hopper(
    tmp_path: Path, form: str, config: dict[str, Any], words: tuple[str, ...]
) -> None:
    reason(plan(write_checkpoint(tmp_path / "m", tensors(form), config), *words), "nibble")


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
        ("--spec-method", "mtp"),
        ("--diffusion-config", '{"canvas_length": 256}'),
        ("--max-num-batched-tokens", "32768"),
    ],
    ids=["drafts", "drafts whose number the model has", "diffusion", "long prompts"],
)
def test_steps_of_many_rows_are_for_nibbles_kernel(model: Path, words: tuple[str, ...]) -> None:
    assert reason(plan(model, *words), "nibble") == FOR_ALL_ROWS


def test_a_diffusion_model_takes_nibbles_kernel(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tensors("nvfp4"), W4A4 | {"canvas_length": 256})
    assert reason(plan(folder), "nibble") == FOR_ALL_ROWS


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200"])
def test_where_it_has_not_run_nibbles_kernel_is_not_chosen(model: Path, target: str) -> None:
    bf16 = plan(model, "--nvfp4-activations", "bf16", target=target)
    assert "is tested only on hopper" in reason(bf16, "vllm")
    why = reason(plan(model, target=target), "vllm")
    w4a4 = f"nibble's W4A4 kernel has not been measured in a server on {target}"
    assert why == ("nibble's kernel is tested only on hopper" if target == "b200" else w4a4)


def test_what_has_no_nvfp4_product_on_a_gpu_has_no_choice(model: Path, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", tensors("bf16"))
    for found in (plan(model, target="cpu"), plan(plain)):
        assert "linear_kernel" not in found.choices
        config = found.args[FLAG].value if FLAG in found.args else {"nibble": {}}
        assert "linear_kernel" not in config["nibble"]


@pytest.mark.parametrize(
    "given",
    [
        {"VLLM_EXTRA_ARGS": "--linear-backend marlin"},
        {"VLLM_EXTRA_ARGS": "--kernel-config.linear_backend marlin"},
        {"VLLM_NVFP4_GEMM_BACKEND": "marlin"},
    ],
    ids=str,
)
def test_auto_gives_way_to_a_linear_backend(model: Path, given: dict[str, str]) -> None:
    assert reason(plan(model, **given), "vllm") == ("--linear-backend marlin names another kernel")


def test_what_the_user_names_is_taken(model: Path) -> None:
    assert reason(plan(model, "--linear-kernel", "vllm"), "vllm") == "set by the user"
    named = plan(model, NIBBLE_LINEAR_KERNEL="nibble")
    assert reason(named, "nibble") == "set by the user"
    assert named.choices["linear_kernel"].source == "environment NIBBLE_LINEAR_KERNEL"
    told = plan(model, FLAG, '{"nibble": {"linear_kernel": "vllm"}}')
    assert told.choices["linear_kernel"].value == "vllm"
    assert told.args[FLAG].value == {"nibble": {"linear_kernel": "vllm", **BY_DEFAULT}}


def test_auto_over_a_files_kernel_chooses_by_itself(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text('linear_kernel = "vllm"\n')
    given = {"NIBBLE_CONFIG": str(file)}
    reason(plan(model, **given), "vllm")
    reason(plan(model, NIBBLE_LINEAR_KERNEL="auto", **given), "nibble")


def test_what_else_the_plugin_is_told_is_kept(model: Path) -> None:
    found = plan(model, "--quantize-lm-head", "nvfp4", FLAG, '{"other": 1}')
    ours = {"quantize_lm_head": "nvfp4", "linear_kernel": "nibble", **BY_DEFAULT}
    assert found.args[FLAG].value == {"other": 1, "nibble": ours}
    assert found.args[FLAG].source.startswith("nibble's default + ")


def test_the_kernel_that_auto_chose_is_the_one_expected_to_run(model: Path) -> None:
    def allowed(found: Plan) -> tuple[str, ...]:
        return next(want.allowed for want in expectations(found, {}) if want.part == "linear")

    assert allowed(plan(model)) == ("NibbleNvFp4LinearKernel",)
    assert "HummingNvFp4LinearKernel" in allowed(plan(model, "--linear-kernel", "vllm"))


def test_a_checkpoint_that_is_not_here_yet_is_not_decided_about() -> None:
    assert reason(plan("acme/x-NVFP4"), "vllm") == "the checkpoint is unknown until pull"


@pytest.fixture
def quartet2(tmp_path: Path) -> Path:
    config = {"model_type": "cloverlm", "architectures": ["CloverLMForCausalLM"]}
    folder = write_checkpoint(tmp_path / "quartet2", tensors("quartet2"), config)
    (folder / "a.vocab").touch()
    return folder


def test_quartet_ii_takes_nibbles_kernel(quartet2: Path) -> None:
    assert reason(plan(quartet2, MAX_NUM_SEQS="64"), "nibble") == FOR_ALL_ROWS


def test_quartet_ii_keeps_its_own_fp4_products_on_sm12x(quartet2: Path) -> None:
    with pytest.raises(NibbleError, match="has them in FP4 on gb10"):
        plan(quartet2, "--linear-kernel", "nibble", target="gb10")


def test_what_vllm_cannot_serve_in_one_order_of_sums_is_for_nibbles_kernel(
    quartet2: Path, model: Path, tmp_path: Path
) -> None:
    """Quartet II where the GPU has no FP4 product, and weights alone anywhere; W4A4 vLLM has
    kernels for.
    """
    file = tmp_path / "nibble.toml"
    file.write_text('[env]\nVLLM_BATCH_INVARIANT = "1"\n')
    invariant, many = {"VLLM_BATCH_INVARIANT": "1"}, {"MAX_NUM_SEQS": "64"}
    for given in (invariant, {"NIBBLE_CONFIG": str(file)}):
        assert "a fixed order of additions" in reason(plan(quartet2, **given), "nibble")
    bf16 = ("--nvfp4-activations", "bf16")
    for target in ("hopper", "b200"):
        assert "a fixed order of additions" in reason(
            plan(model, *bf16, target=target, **invariant, **many), "nibble"
        )
    reason(plan(model, target="b200", **invariant, **many), "vllm")
    reason(plan(quartet2, target="b200", **invariant), "vllm")
    assert reason(plan(quartet2, VLLM_BATCH_INVARIANT="0"), "nibble") == FOR_ALL_ROWS


def test_one_order_of_sums_takes_nibbles_kernel_where_vllm_would_emulate_fp4_and_auto_may_choose(
    model: Path,
) -> None:
    """The emulation would end the start: it is slow, and no setting asks for it."""
    given = {"VLLM_BATCH_INVARIANT": "1", "MAX_NUM_SEQS": "64"}
    assert "only W4A4 kernel with a fixed order of additions" in reason(
        plan(model, **given), "nibble"
    )
    reason(plan(model, "--linear-kernel", "vllm", **given), "vllm")
    reason(plan(model, **given, VLLM_EXTRA_ARGS="--linear-backend emulation"), "vllm")


def test_experts_alone_are_not_linear_layers(tmp_path: Path) -> None:
    weights = tensors("bf16") | linear("model.layers.0.mlp.experts.0.down_proj", 64, 64, "nvfp4")
    folder = write_checkpoint(tmp_path / "m", weights, W4A4 | EXPERTS)
    assert "only experts are NVFP4" in reason(plan(folder), "vllm")


def test_rows_that_the_kernel_cannot_divide_are_left_to_vllm(tmp_path: Path) -> None:
    weights = tensors("nvfp4") | linear("model.layers.0.mlp.up_proj", 72, 64, "nvfp4")
    folder = write_checkpoint(tmp_path / "m", weights, W4A4 | OTHER_FAMILY)
    reason(plan(folder), "nibble")
    why = reason(plan(folder, TENSOR_PARALLEL_SIZE="2"), "vllm")
    assert why == "model.layers.0.mlp.up_proj has 72 rows, not a multiple of 16"


# --- what is installed ----------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this an H200 machine with a nibble-kernels of these files; None: without one."""
    gpu = Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "GPU-0")
    here = Hardware((gpu,), "580.105.08", "13.0", "x86_64", 8, frozenset(), 128 * GIB, 100 * GIB)
    monkeypatch.setattr(prepare, "detect", lambda environ: here)
    point = importlib.metadata.EntryPoint(
        "nibble", "nibble.engine.plugin:register", "vllm.general_plugins"
    )

    def use(*files: str | None) -> None:
        folder, spec = (
            tmp_path / "nibble_kernels",
            ModuleSpec("nibble_kernels", None, is_package=True),
        )
        folder.mkdir()
        spec.submodule_search_locations = [str(folder)]
        for name in filter(None, files):
            (folder / name).touch()
        found = files != (None,)
        monkeypatch.setattr(installed, "entry_points", lambda **_: [point] if found else [])
        monkeypatch.setattr(installed, "find_spec", lambda name: spec if found else None)

    return use


def test_auto_chooses_nibbles_kernel_where_it_is_compiled(model: Path, install: Any) -> None:
    install("_cpu.abi3.so", "_cuda.abi3.so")
    reason(plan(model), "nibble")


def test_auto_gives_way_where_nibbles_kernel_is_not_compiled(model: Path, install: Any) -> None:
    install("_cpu.abi3.so")
    assert reason(plan(model), "vllm") == "nibble-kernels was installed without its CUDA kernels"
    reason(plan(model, "--linear-kernel", "nibble"), "nibble")


def test_auto_gives_way_where_the_plugin_is_not_installed(model: Path, install: Any) -> None:
    install(None)
    found = plan(model)
    assert "is not installed" in reason(found, "vllm")
    assert ["warning: " in line for line in check_plugin(found, {})] == [
        True
    ]  # as without the option


def test_auto_gives_way_where_vllm_is_told_to_leave_the_plugin_out(
    model: Path, install: Any, tmp_path: Path
) -> None:
    install("_cuda.abi3.so")
    assert "VLLM_PLUGINS excludes" in reason(plan(model, VLLM_PLUGINS="other"), "vllm")
    reason(plan(model, VLLM_PLUGINS="other,nibble"), "nibble")
    file = tmp_path / "nibble.toml"
    file.write_text('[env]\nVLLM_PLUGINS = "other"\n')
    assert "VLLM_PLUGINS excludes" in reason(plan(model, NIBBLE_CONFIG=str(file)), "vllm")
