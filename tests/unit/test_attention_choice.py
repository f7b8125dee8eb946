"""Which attention backend the plan names, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.machine.hardware import Gpu
from nibble.plan.attention import FLASHINFER_CONFIG, VLLM
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.resolve import make_plan
from tests.support.models.tiny_checkpoint import write_checkpoint

HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
# Without nibble's kernel, which `auto` takes.
FP8 = ("--kv-cache-dtype", "fp8", "--attention-kernel", "vllm")
FP8_WITHOUT_STEP_GRAPHS = (*FP8, "--step-graph", "off")


def planned(
    model: Path, *words: str, target: str = "hopper", **environ: str
) -> tuple[str, str, Any, Any]:
    """(choice, reason, --attention-backend, --attention-config)"""
    found = plan_for(read_wishes([str(model), "--target", target, *words], environ))
    args = {name: choice.value for name, choice in found.args.items()}
    choice = found.choices.get("attention")
    return (
        choice.value if choice else "",
        choice.reason if choice else "",
        args.get("--attention-backend"),
        args.get("--attention-config"),
    )


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hybrid", config=HYBRID)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a server with FlashInfer had been measured."""
    monkeypatch.setattr("nibble.plan.attention.SERVED", frozenset({"FLASHINFER"}))


def test_no_backend_is_named_before_a_server_was_measured_with_it(hybrid: Path) -> None:
    value, reason, backend, config = planned(hybrid, *FP8_WITHOUT_STEP_GRAPHS)
    assert (value, backend, config) == (VLLM, None, None)
    assert "decodes faster here, but prompts and servers are not measured" in reason


@pytest.mark.usefixtures("served")
def test_flashinfer_reads_an_fp8_cache_with_head_dim_256(hybrid: Path) -> None:
    value, reason, backend, config = planned(hybrid, *FP8_WITHOUT_STEP_GRAPHS)
    assert (value, backend, config) == ("FLASHINFER", "FLASHINFER", FLASHINFER_CONFIG)
    assert "176 vs 106" in reason


def test_vllm_chooses_for_every_other_measured_cache(hybrid: Path, tmp_path: Path) -> None:
    narrow = write_checkpoint(tmp_path / "narrow", config={**HYBRID, "head_dim": 128})
    vllms = ("--attention-kernel", "vllm")
    for model, words in ((hybrid, vllms), (narrow, vllms), (narrow, FP8)):
        value, reason, backend, config = planned(model, *words)
        assert (value, backend, config) == (VLLM, None, None)
        assert reason.startswith("H200: ")


def test_an_unmeasured_head_dim_group_or_target_is_vllms(hybrid: Path, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", config={**HYBRID, "head_dim": 64})
    alone = {**HYBRID, "num_attention_heads": 2}
    single = write_checkpoint(tmp_path / "single", config=alone)
    cases = [(small, "hopper"), (single, "hopper"), (hybrid, "b200"), (hybrid, "gb10")]
    for model, target in cases:
        value, reason, backend, _ = planned(model, *FP8, target=target)
        assert (value, backend) == (VLLM, None)
        assert reason.startswith("not compared on "), reason
    assert planned(hybrid, target="cpu")[0] == ""


def test_a_backend_that_the_user_names_wins(hybrid: Path) -> None:
    for words, environ in (
        (("--attention-backend", "FLASH_ATTN"), {}),
        ((), {"ATTENTION_BACKEND": "flash_attn"}),
        (("--attention-config", '{"backend": "FLASH_ATTN"}'), {}),
    ):
        value, reason, backend, config = planned(hybrid, *FP8, *words, **environ)
        assert value == "FLASH_ATTN"
        assert reason == "named by this layer"
        assert backend in (None, "FLASH_ATTN")
        assert config in (None, {"backend": "FLASH_ATTN"})


@pytest.mark.parametrize(
    ("words", "environ", "limit"),
    [
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'), {}, "drafts"),
        ((), {"VLLM_BATCH_INVARIANT": "1"}, "order of additions"),
        (("--block-size", "24"), {}, "multiples of 16"),
    ],
)
def test_a_limit_of_flashinfer_leaves_the_choice_to_vllm(
    hybrid: Path, words: tuple[str, ...], environ: dict[str, str], limit: str
) -> None:
    value, reason, backend, _ = planned(hybrid, *FP8_WITHOUT_STEP_GRAPHS, *words, **environ)
    assert (value, backend) == (VLLM, None)
    assert limit in reason


@pytest.mark.usefixtures("served")
def test_steps_from_graphs_are_worth_more_than_the_backend(hybrid: Path) -> None:
    value, reason, backend, _ = planned(hybrid, *FP8)
    assert (value, backend) == (VLLM, None)
    assert "steps from CUDA graphs" in reason
    assert planned(hybrid, *FP8_WITHOUT_STEP_GRAPHS)[0] == "FLASHINFER"


@pytest.mark.usefixtures("served")
def test_the_gpu_found_decides(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the H200 are not taken for a GH200, and without nvcc FlashInfer has no kernel."""
    monkeypatch.setattr("nibble.plan.gather.make_plan", lambda inputs: inputs)
    inputs: Any = plan_for(
        read_wishes([str(hybrid), "--target", "hopper", *FP8_WITHOUT_STEP_GRAPHS], {})
    )

    def choice(name: str, *, can_compile: bool = True) -> tuple[str, str]:
        gpu = Gpu(0, name, (9, 0), 150 << 30, 149 << 30, "GPU-0")
        hardware = replace(inputs.hardware, gpus=(gpu,), assumed=False)
        found = make_plan(replace(inputs, hardware=hardware, can_compile=can_compile))
        return found.choices["attention"].value, found.choices["attention"].reason

    assert choice("NVIDIA H200")[0] == "FLASHINFER"
    assert choice("NVIDIA H100 80GB HBM3")[0] == "FLASHINFER"
    assert choice("NVIDIA GH200 480GB")[1].startswith("not compared on NVIDIA GH200")
    assert "nvcc" in choice("NVIDIA H200", can_compile=False)[1]
