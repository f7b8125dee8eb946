"""Sequences of models with recurrent state: as many as the KV cache has blocks for their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Gpu, Hardware
from nibble.plan import budget, gather
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_checkpoint import write_checkpoint
from tests.support.refusals import refusal_of

GIB, MIB = 1 << 30, 1 << 20
SEQUENCES = "--max-num-seqs"
DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "head_dim": 256,
    "max_position_embeddings": 262144,
}
# Name -> (published shape, GiB of weights, MiB of a block: pages of one of vLLM's groups)
MODELS: dict[str, tuple[dict[str, Any], int, float]] = {
    "Qwen3.6-35B-A3B": (
        DELTA_NET
        | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32},
        22,
        10 * 1056 * 2048 / MIB,  # 10 pages of attention, 1056 tokens each
    ),
    "Qwen3.6-27B": (
        DELTA_NET
        | {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120}
        | {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
        20,
        16 * 784 * 4096 / MIB,
    ),
    "Nemotron-3-Nano": (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "num_hidden_layers": 52,
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "max_position_embeddings": 262144,
        },
        19,
        6 * 2096 * 1024 / MIB,
    ),
}


def hardware(name: str, capability: tuple[int, int], gib: float) -> Hardware:
    gpu = Gpu(0, name, capability, int(gib * GIB), int((gib - 1) * GIB), "GPU-0")
    cpu = ("x86_64", 20, frozenset[str]())
    return Hardware((gpu,), "580.95", "13.0", *cpu, 512 * GIB, 500 * GIB)


H200 = hardware("NVIDIA H200", (9, 0), 139.8)
H100 = hardware("NVIDIA H100", (9, 0), 79.2)
B200 = hardware("NVIDIA B200", (10, 0), 178)
RTX_5090 = hardware("NVIDIA GeForce RTX 5090", (12, 0), 31.8)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(name: str, machine: Hardware, *words: str, **environ: str) -> Plan:
        shape, weights, _ = MODELS[name]
        folder = write_checkpoint(tmp_path / "m", config={"architectures": ["X"]} | shape)
        monkeypatch.setattr(gather, "detect", lambda environ: machine)
        monkeypatch.setattr(budget, "weights_bytes_per_gpu", lambda *_: weights * GIB)
        environ = {"HF_HUB_OFFLINE": "1", "NIBBLE_LINEAR_KERNEL": "vllm"} | environ
        return plan_for(read_wishes([str(folder), *words], environ))

    return make


def refusal(make: Any, *words: Any, **environ: str) -> NibbleError:
    return refusal_of(lambda: make(*words, **environ))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("machine", [H200, B200], ids=["hopper", "b200"])
def test_with_much_memory_vllms_default_stays(plan: Any, name: str, machine: Hardware) -> None:
    assert SEQUENCES not in plan(name, machine).args


@pytest.mark.parametrize("name", MODELS)
def test_a_default_above_the_blocks_is_lowered_with_the_reason(plan: Any, name: str) -> None:
    _, weights, block = MODELS[name]
    room_gib = 4
    share = (weights + 2 + room_gib) / 139.8
    choice = plan(name, H200, GPU_MEMORY_UTIL=f"{share:.3f}").args[SEQUENCES]
    assert choice.value == pytest.approx(room_gib / 2 * 1024 / block, rel=0.1)
    assert f"about {choice.value} blocks of {block:.1f} MiB" in choice.reason


@pytest.mark.parametrize(("name", "blocks"), [("Qwen3.6-35B-A3B", 198), ("Qwen3.6-27B", 83)])
def test_a_cache_in_bytes_has_exactly_its_blocks(plan: Any, name: str, blocks: int) -> None:
    found = plan(name, H200, NIBBLE_KV_CACHE_BYTES=str(4 * GIB))
    assert found.args[SEQUENCES].value == blocks
    # The graphs are those of that number of sequences
    assert found.args["--cudagraph-capture-sizes"].value[-1] == blocks


def test_ones_own_number_is_refused_where_it_cannot_start(plan: Any) -> None:
    name, room = "Qwen3.6-35B-A3B", {"NIBBLE_KV_CACHE_BYTES": str(4 * GIB)}
    assert plan(name, H200, MAX_NUM_SEQS="198", **room).args[SEQUENCES].value == 198
    error = refusal(plan, name, H200, MAX_NUM_SEQS="199", **room)
    assert error.code is ExitCode.NO_FIT and error.expected == "at most 198"
    assert "MAX_NUM_SEQS is 199" in error.what and "198 blocks" in error.what


def test_where_vllm_measures_the_cache_ones_own_number_may_start(plan: Any) -> None:
    name, small = (
        "Qwen3.6-35B-A3B",
        {"GPU_MEMORY_UTIL": "0.22"},
    )  # 30.8 GiB, 6.8 of it for the cache
    kept = plan(name, H200, MAX_NUM_SEQS="300", **small)
    assert kept.args[SEQUENCES].value == 300
    assert any("MAX_NUM_SEQS is 300" in notice for notice in kept.notices)
    assert refusal(plan, name, H200, MAX_NUM_SEQS="600", **small).code is ExitCode.NO_FIT


@pytest.mark.parametrize(
    "words",
    [
        ("--enforce-eager",),
        ("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'),
        ("--optimization-level", "1"),
    ],
)
def test_without_full_graphs_vllm_has_no_such_limit(plan: Any, words: tuple[str, ...]) -> None:
    found = plan("Qwen3.6-35B-A3B", H200, *words, NIBBLE_KV_CACHE_BYTES=str(4 * GIB))
    assert SEQUENCES not in found.args


def test_a_targets_number_is_lowered_too(plan: Any) -> None:
    found = plan("Qwen3.6-35B-A3B", RTX_5090, NIBBLE_KV_CACHE_BYTES=str(GIB))
    own = plan("Qwen3.6-35B-A3B", RTX_5090).args[SEQUENCES]
    assert own.source == "target sm120"
    assert found.args[SEQUENCES].value == min(own.value, 49)


def test_a_number_of_blocks_of_ones_own_counts(plan: Any) -> None:
    found = plan("Qwen3.6-35B-A3B", H200, "--num-gpu-blocks-override", "77")
    assert found.args[SEQUENCES].value == 77
