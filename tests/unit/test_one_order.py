"""VLLM_BATCH_INVARIANT with NVFP4 on a GPU: plan, plugin and comparison name the same kernels,
or the start is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.canary.kernels import deviations, expectations
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Gpu, Hardware
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.canary.worker_reports import RAN
from tests.support.models.tiny_checkpoint import linear, tensors, write_checkpoint
from tests.support.models.tiny_model import MODELOPT_NVFP4
from tests.support.refusals import refusal_of

W4A4: dict[str, Any] = {"quantization_config": MODELOPT_NVFP4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
WEIGHT_ONLY = ("--nvfp4-activations", "bf16")
MARLIN = ("--linear-backend", "marlin")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", tensors("nvfp4"), W4A4)


def plan(
    model: Path, *words: str, target: str = "hopper", invariant: str = "1", **environ: str
) -> Plan:
    given = {"VLLM_BATCH_INVARIANT": invariant} | environ
    return plan_for(read_wishes([str(model), "--target", target, *words], given))


def refused(model: Path, *words: str, **environ: str) -> NibbleError:
    return refusal_of(lambda: plan(model, *words, **environ), ExitCode.CONFIG)


@pytest.mark.parametrize(
    ("words", "target", "takes"),
    [
        ((*WEIGHT_ONLY, *MARLIN), "hopper", "nibble's kernel"),
        ((*WEIGHT_ONLY, "--kernel-config.linear_backend", "humming"), "hopper", "nibble's kernel"),
        ((*WEIGHT_ONLY, "--linear-backend", "cutlass"), "b200", "nibble's kernel"),
        (MARLIN, "hopper", "vLLM's emulation"),
        (MARLIN, "gb10", "CUTLASS"),
    ],
)
def test_a_backend_that_does_not_add_in_one_order_is_refused_before_a_load(
    model: Path, words: tuple[str, ...], target: str, takes: str
) -> None:
    error = refused(model, *words, target=target)
    assert f"needs {takes} for the NVFP4 layers" in error.what
    assert "--linear-backend auto" in error.action and "VLLM_BATCH_INVARIANT" in error.action
    plan(model, *words, target=target, invariant="0")


def test_the_backend_that_vllm_takes_anyway_may_be_named(model: Path, tmp_path: Path) -> None:
    plan(model, "--linear-backend", "cutlass", target="b200")
    plan(model, "--linear-backend", "emulation")
    plan(write_checkpoint(tmp_path / "bf16", tensors("bf16")), *MARLIN)
    weights = tensors("bf16") | linear("model.layers.0.mlp.experts.0.down_proj", 64, 64, "nvfp4")
    # No linear layer is NVFP4
    plan(write_checkpoint(tmp_path / "experts", weights, W4A4 | EXPERTS), *MARLIN)


def test_nibbles_experts_do_not_add_in_one_order(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tensors("nvfp4"), W4A4 | EXPERTS)
    assert "NIBBLE_MOE_KERNEL=nibble" in refused(folder, "--moe-kernel", "nibble").what


@pytest.mark.parametrize("target", ["gb10", "sm120"])
def test_nibbles_w4a4_kernel_has_no_such_order(model: Path, target: str) -> None:
    error = refused(model, "--linear-kernel", "nibble", target=target)
    assert "the order of its W4A4 sums depends on the number of rows" in error.what
    assert "NIBBLE_NVFP4_ACTIVATIONS=bf16" in error.action
    plan(model, "--linear-kernel", "nibble", *WEIGHT_ONLY, target=target)
    plan(model, "--linear-kernel", "nibble", target=target, invariant="0")


def test_weights_alone_need_nibbles_kernel_to_be_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0, "NVIDIA H200", (9, 0), 140 << 30, 139 << 30, "GPU-0")
    here = Hardware((gpu,), "580.105.08", "13.0", "x86_64", 8, frozenset(), 128 << 30, 100 << 30)
    monkeypatch.setattr(prepare, "detect", lambda environ: here)
    monkeypatch.setattr(prepare, "missing_gpu_kernels", lambda environ: "there is none")
    assert "there is none" in refused(model, *WEIGHT_ONLY).what
    plan(model, *WEIGHT_ONLY, invariant="0")


@pytest.mark.parametrize("target", ["hopper", "b200", "gb10", "sm120"])
@pytest.mark.parametrize("words", [WEIGHT_ONLY, ()], ids=["weights alone", "W4A4"])
def test_what_runs_then_is_what_the_plan_expects(
    model: Path, target: str, words: tuple[str, ...]
) -> None:
    has_product = target != "hopper"
    kernel = "CutlassNvFp4LinearKernel" if has_product and not words else "NibbleNvFp4LinearKernel"
    ran = RAN | {"linear": {f"nvfp4: {kernel}": 144}}
    found = plan(model, *words, target=target, MAX_NUM_SEQS="4")
    parts = [
        one for one in expectations(found, {"VLLM_BATCH_INVARIANT": "1"}) if one.part == "linear"
    ]
    assert deviations(parts, [ran]) == ()
