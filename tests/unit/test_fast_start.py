"""What a plan does for a quick start: where compiled code is kept, and what of the start is left
out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.step_graph_memory import PROMPT_SIZES
from nibble.machine.hardware import Gpu
from nibble.machine.paths import root
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.hardware import GIB, H200, HOPPER, SPARK
from tests.support.models.tiny_model import QWEN3, write_model

DEMO = "nibble-demo-nvfp4"
SM120 = replace(
    HOPPER, gpus=(Gpu(0, "RTX PRO 6000 Blackwell", (12, 0), 95 * GIB, 94 * GIB, "GPU-0"),)
)
FLAG = "--cudagraph-capture-sizes"


def plan(*words: str, **environ: str) -> Plan:
    return plan_for(read_wishes(list(words), {"HOME": "/home/me", "HF_HUB_OFFLINE": "1"} | environ))


def names(found: Plan) -> dict[str, str]:
    return {key.kind: key.name for key in found.caches.keys}


def test_every_cache_of_compiled_code_lies_in_the_entries_of_the_plan(on) -> None:
    on(HOPPER)
    found = plan(DEMO)
    kernels, graphs = found.caches.folder("kernels"), found.caches.folder("graphs")
    assert kernels.parent == graphs.parent == Path("/home/me/.cache/nibble/engine")
    wanted = {
        "VLLM_CACHE_ROOT": graphs / "vllm",
        "TORCHINDUCTOR_CACHE_DIR": graphs / "inductor",
        "TRITON_CACHE_DIR": kernels / "triton",
        "FLASHINFER_WORKSPACE_BASE": kernels,
        "HUMMING_CACHE_DIR": kernels / "humming",
        "CUDA_CACHE_PATH": kernels / "cuda",
    }
    assert {name: Path(found.env[name].value) for name in wanted} == wanted
    assert all(found.env[name].reason for name in wanted)


def test_another_model_or_flag_that_shapes_graphs_is_another_entry_with_the_same_kernels(
    on, tmp_path
) -> None:
    on(HOPPER)
    first = names(plan(DEMO))
    for other in (
        plan(DEMO, MAX_NUM_SEQS="4"),
        plan(DEMO, "--kv-cache-dtype", "fp8"),
        plan(str(write_model(tmp_path / "m"))),
    ):
        assert names(other)["graphs"] != first["graphs"]
        assert names(other)["kernels"] == first["kernels"]


def test_the_server_around_the_engine_and_free_memory_do_not_change_the_entry(on) -> None:
    on(HOPPER)
    first = names(plan(DEMO))
    assert (
        names(plan(DEMO, PORT="9000", NIBBLE_SERVED_MODEL_NAME="m", NIBBLE_DRAIN_SECONDS="5"))
        == first
    )
    on(replace(HOPPER, gpus=(replace(H200, memory_free_bytes=70 * GIB),)))
    assert names(plan(DEMO)) == first


def test_another_gpu_build_or_cpu_is_another_entry(on, monkeypatch: pytest.MonkeyPatch) -> None:
    on(HOPPER)
    first = names(plan(DEMO))
    on(SM120)
    assert not set(names(plan(DEMO)).values()) & set(first.values())
    on(HOPPER)
    monkeypatch.setattr(prepare, "compiled_id", lambda: "another")
    assert not set(names(plan(DEMO)).values()) & set(first.values())
    on(replace(HOPPER, gpus=()))
    wide = names(plan(DEMO))
    on(replace(HOPPER, gpus=(), cpu_flags=frozenset({"avx2"})))
    assert not set(names(plan(DEMO)).values()) & set(wide.values())


def test_a_plan_for_another_machine_names_no_entry(on) -> None:
    on(replace(HOPPER, gpus=()))
    found = plan(DEMO, "--target", "b200")
    assert found.caches.keys == () and "VLLM_CACHE_ROOT" not in found.env


def test_a_users_own_cache_folder_wins_and_the_images_own_does_not(on) -> None:
    on(HOPPER)
    mine = plan(DEMO, VLLM_CACHE_ROOT="/mine/vllm").env["VLLM_CACHE_ROOT"]
    assert (mine.value, mine.source) == ("/mine/vllm", "environment VLLM_CACHE_ROOT")
    assert plan(DEMO, VLLM_CACHE_ROOT="").env["VLLM_CACHE_ROOT"].source == "nibble's default"
    image = {"NIBBLE_IMAGE": "hopper", "NIBBLE_CACHE_DIR": "/var/cache/nibble"}
    set_by_image = images_variables("hopper")
    found = plan(DEMO, **image, **set_by_image)
    for name in set_by_image:
        assert Path(found.env[name].value).is_relative_to("/var/cache/nibble/engine"), name
    mounted = plan(DEMO, **image, **{**set_by_image, "VLLM_CACHE_ROOT": "/root/.cache/vllm"})
    assert mounted.env["VLLM_CACHE_ROOT"].value == "/root/.cache/vllm"


def images_variables(target: str) -> dict[str, str]:
    """The cache folders docker/Dockerfile.TARGET sets, from its text."""
    words = (root() / "docker" / f"Dockerfile.{target}").read_text().replace("\\\n", " ").split()
    wanted = (
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    )
    found = dict(
        word.split("=", 1) for word in words if word.startswith((*wanted, "CUDA_CACHE_PATH"))
    )
    assert set(found) == {*wanted, "CUDA_CACHE_PATH"}
    return found


def test_the_startup_plan_is_for_discrete_gpus_whose_kv_cache_vllm_measures(on) -> None:
    on(HOPPER)
    assert plan(DEMO).env["VLLM_ENABLE_STARTUP_PLAN"].value == "1"
    assert "VLLM_ENABLE_STARTUP_PLAN" not in plan(DEMO, NIBBLE_KV_CACHE_BYTES="1073741824").env
    assert plan(DEMO, VLLM_ENABLE_STARTUP_PLAN="0").env["VLLM_ENABLE_STARTUP_PLAN"].value == "0"
    on(SPARK)
    assert "VLLM_ENABLE_STARTUP_PLAN" not in plan(DEMO).env


def test_one_engine_on_one_gpu_is_forked_so_that_nothing_is_imported_twice(on) -> None:
    on(HOPPER)
    found = plan(DEMO).env["VLLM_WORKER_MULTIPROC_METHOD"]
    assert (found.value, found.source) == ("fork", "nibble's default")
    assert (
        plan(DEMO, VLLM_WORKER_MULTIPROC_METHOD="spawn").env["VLLM_WORKER_MULTIPROC_METHOD"].value
        == "spawn"
    )
    on(SPARK)
    assert plan(DEMO).env["VLLM_WORKER_MULTIPROC_METHOD"].value == "fork"
    on(replace(HOPPER, gpus=()))
    assert plan(DEMO).env["VLLM_WORKER_MULTIPROC_METHOD"].value == "fork"


@pytest.mark.parametrize(
    "more",
    [
        ["--tensor-parallel-size", "2"],
        ["--data-parallel-size", "2"],
        ["--api-server-count", "2"],
        ["--distributed-executor-backend", "mp"],
        ["--numa-bind"],
    ],
)
def test_several_processes_are_started_as_vllms_command_line_does_it(on, more: list[str]) -> None:
    on(replace(HOPPER, gpus=HOPPER.gpus * 2))
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in plan(DEMO, *more).env


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [("1", [1]), ("3", [1, 2, 3]), ("8", [1, 2, 4, 8]), ("20", [1, 2, 4, 8, 16, 20])],
)
def test_graphs_are_captured_up_to_max_num_seqs(on, asked: str, sizes: list[int]) -> None:
    on(HOPPER)
    found = plan(DEMO, "--step-graph", "off", MAX_NUM_SEQS=asked)
    assert found.args[FLAG].value == sizes
    words = found.argv()
    assert words[words.index(FLAG) + 1 : words.index(FLAG) + 1 + len(sizes)] == [
        str(size) for size in sizes
    ]


def test_with_steps_from_graphs_prompts_of_512_tokens_are_captured_too(on) -> None:
    on(HOPPER)
    found = plan(DEMO, MAX_NUM_SEQS="20").args[FLAG]
    assert found.value == sorted({1, 2, 4, 8, 20, *PROMPT_SIZES}) and "prompts" in found.reason
    fewer = plan(DEMO, "--max-num-batched-tokens", "256", MAX_NUM_SEQS="20").args[FLAG]
    assert fewer.value == [size for size in found.value if size <= 256]


@pytest.mark.parametrize(
    "more",
    [
        ["--max-cudagraph-capture-size", "64"],
        ["--cudagraph-capture-sizes", "1", "2"],
        ["--compilation-config", '{"cudagraph_capture_sizes": [1, 2]}'],
        ["--compilation-config", '{"cudagraph_mode": "NONE"}'],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
        ["--enforce-eager"],
    ],
)
def test_captures_that_somebody_chose_or_that_vllm_must_choose_are_left_alone(
    on, more: list[str]
) -> None:
    on(HOPPER)
    chosen = plan(DEMO, *more, MAX_NUM_SEQS="8").args.get(FLAG)
    assert chosen is None or chosen.source == "command line"


def test_without_max_num_seqs_vllm_chooses_the_graphs(on) -> None:
    on(HOPPER)
    assert FLAG not in plan(DEMO).args


def test_flashinfer_is_tuned_only_where_one_of_its_kernels_can_run(on) -> None:
    on(HOPPER)
    name = "--enable-flashinfer-autotune"
    assert (
        plan(DEMO).args[name].value is False
        and "--no-enable-flashinfer-autotune" in plan(DEMO).argv()
    )
    assert name not in plan(DEMO, "--attention-backend", "FLASHINFER").args
    assert plan(DEMO, name).args[name].value is True
    on(SM120)
    assert name not in plan(DEMO).args


@pytest.mark.parametrize(
    ("more", "is_off"),
    [
        ({}, True),
        ({"num_experts": 8}, False),
        ({"quantization_config": {"quant_method": "fp8"}}, False),
    ],
    ids=["dense BF16", "experts", "FP8"],
)
def test_flashinfer_tunes_nothing_for_a_dense_model_in_bf16(
    on, tmp_path: Path, more: dict[str, Any], is_off: bool
) -> None:
    name = "--enable-flashinfer-autotune"
    model = str(write_model(tmp_path / "m", QWEN3 | more))
    for machine in (HOPPER, SM120):
        on(machine)
        assert (name in plan(model).args) is is_off
        assert name not in plan(model, "--linear-backend", "flashinfer_cutlass").args
