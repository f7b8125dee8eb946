"""The memory budget: sums in bytes from what is free, caps, vLLM's own check, refusals and what
to turn down.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Gpu, Hardware
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.serve.preflight.machine import check_memory
from tests.support.models.tiny_model import QWEN3, write_model
from tests.support.refusals import refusal_of

GIB = 1 << 30
KV, UTILIZATION = "--kv-cache-memory-bytes", "--gpu-memory-utilization"
SPARK = Hardware(
    (Gpu(0, "NVIDIA GB10", (12, 1), None, None, "GPU-0"),),
    "580.95",
    "13.0",
    "aarch64",
    20,
    frozenset(),
    int(121.69 * GIB),
    101 * GIB,
)
H200 = replace(SPARK, gpus=(Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "GPU-0"),))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "m", QWEN3 | {"max_position_embeddings": 4 << 20}))


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, model: str) -> Any:
    def make(hardware: Hardware = SPARK, *words: str, **environ: str) -> Plan:
        monkeypatch.setattr(prepare, "detect", lambda environ: hardware)
        return plan_for(read_wishes([model, *words], {"HF_HUB_OFFLINE": "1", **environ}))

    return make


def large(plan: Plan, weights: int, sequence: int) -> Plan:
    """`plan` as if the model were that large."""
    budget = plan.budget
    room = (budget.allowed_bytes or 0) - weights - budget.overhead_bytes
    return replace(
        plan,
        budget=replace(budget, weights_bytes=weights, sequence_bytes=sequence, room_bytes=room),
    )


def refusal(plan: Plan) -> NibbleError:
    return refusal_of(lambda: check_memory(plan))


def test_unified_memory_gets_kv_bytes_and_a_fraction_from_what_is_available(plan: Any) -> None:
    found = plan()
    assert found.args[KV].source == found.args[UTILIZATION].source == "memory budget"
    assert found.args[KV].value >= 8 * found.budget.sequence_bytes
    assert found.budget.allowed_bytes == 101 * GIB - 8 * GIB


@pytest.mark.parametrize("available_gib", [20, 60, 85, 101])
@pytest.mark.parametrize("cap", ["", "0.9", "0.95"])
def test_vllms_own_check_passes_with_less_than_its_default_free(
    plan: Any, available_gib: int, cap: str
) -> None:
    """vLLM refuses where fraction x total is not free, also with the KV cache in bytes; 4 GiB
    are its processes'.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    here = replace(SPARK, memory_available_bytes=available_gib * GIB)
    found = plan(
        here, NIBBLE_KV_CACHE_BYTES=str(1 << 30), **({"GPU_MEMORY_UTIL": cap} if cap else {})
    )
    snapshot = MemorySnapshot(device=torch.device("cpu"), auto_measure=False)
    snapshot.total_memory, snapshot.free_memory = here.memory_total_bytes, (available_gib - 4) * GIB

    class Config:
        gpu_memory_utilization = 0.92

    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(snapshot, Config)  # type: ignore[arg-type]
    Config.gpu_memory_utilization = found.args[UTILIZATION].value
    assert request_memory(snapshot, Config) > GIB  # type: ignore[arg-type]


def test_a_fraction_that_is_asked_for_is_a_cap_and_never_a_demand(plan: Any) -> None:
    high, low = plan(GPU_MEMORY_UTIL="0.9"), plan(GPU_MEMORY_UTIL="0.3")
    assert high.args[UTILIZATION].value < 0.9 and "is a cap" in high.args[UTILIZATION].reason
    assert low.budget.allowed_bytes == int(0.3 * SPARK.memory_total_bytes)
    assert high.budget.allowed_bytes == 93 * GIB


def test_a_recipes_fraction_is_a_cap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "detect", lambda environ: SPARK)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent"}
    # Its recipe says 0.9
    found = plan_for(read_wishes(["nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4"], offline))
    assert found.args[UTILIZATION].value == 0.73
    assert "0.9 (recipe) is a cap" in found.args[UTILIZATION].reason


def test_a_discrete_gpu_keeps_its_fraction_and_vllm_sizes_the_kv_cache(plan: Any) -> None:
    found = plan(H200)
    assert KV not in found.args and UTILIZATION not in found.args
    busy = replace(H200, gpus=(replace(H200.gpus[0], memory_free_bytes=100 * GIB),))
    assert plan(busy).args[UTILIZATION].value == 0.7
    assert plan(busy, GPU_MEMORY_UTIL="0.5").args[UTILIZATION].value == 0.5


def test_the_fullest_of_the_gpus_that_are_used_decides(plan: Any) -> None:
    def gpus(*free_gib: int) -> Hardware:
        each = (
            replace(H200.gpus[0], index=i, memory_free_bytes=gib * GIB)
            for i, gib in enumerate(free_gib)
        )
        return replace(H200, gpus=tuple(each))

    both = "TENSOR_PARALLEL_SIZE"
    assert plan(gpus(139, 100), **{both: "2"}).args[UTILIZATION].value == 0.7
    assert UTILIZATION not in plan(gpus(139, 100), **{both: "1"}).args
    assert plan(gpus(0), **{both: "1"}).budget.available_bytes == 0


def test_the_kv_cache_is_what_all_sequences_need_and_no_more(plan: Any) -> None:
    for sequences in ("2", "4"):
        found = plan(SPARK, MAX_NUM_SEQS=sequences, MAX_MODEL_LEN="1048576")
        wanted = int(sequences) * found.budget.sequence_bytes
        assert wanted <= found.args[KV].value <= wanted + (1 << 20)


def test_a_model_that_cannot_fit_is_refused_with_the_sum_and_the_steps_in_order(plan: Any) -> None:
    error = refusal(large(plan(), 90 * GIB, 2 * GIB))
    assert error.code is ExitCode.NO_FIT
    assert re.search(
        r"does not fit: weights 90\.0 GiB \+ 1 sequence of \d+ tokens at 2\.0 GiB \+ graphs 1\.0"
        r" GiB \+ "
        r"workspace 1\.7 GiB \+ engine 4\.0 GiB \+ reserve 8\.0 GiB = 106\.7 GiB needed; 101\.0 GiB"
        r" available of "
        r"121\.7 GiB \(MemAvailable\): 5\.7 GiB too little",
        error.line(),
    )
    steps = [
        "MAX_NUM_SEQS=1",
        "MAX_MODEL_LEN=",
        "--kv-cache-dtype fp8",
        "--enforce-eager",
        "a smaller model",
    ]
    found = [
        next(i for i, one in enumerate(plan().ladder) if one.what.startswith(step))
        for step in steps
    ]
    assert found == sorted(found)
    assert "--enforce-eager (1.0 GiB less), stop other programs, a smaller model" in error.line()


def test_what_frees_next_to_nothing_of_what_lacks_is_not_advised(plan: Any) -> None:
    error = refusal(plan(replace(SPARK, memory_available_bytes=4 * GIB), MAX_MODEL_LEN="4096"))
    assert (
        "in this order: --enforce-eager (1.0 GiB less), stop other programs, a smaller model"
        in error.line()
    )


def test_a_cap_that_is_too_low_is_named_first(plan: Any) -> None:
    error = refusal(large(plan(GPU_MEMORY_UTIL="0.5"), 60 * GIB, 2 * GIB))
    assert "of which a cap of 0.5 leaves" in error.line()
    assert "in this order: a GPU_MEMORY_UTIL above 0.5" in error.line()


def test_on_a_discrete_gpu_only_what_is_certain_is_refused(plan: Any) -> None:
    assert refusal(large(plan(H200), 130 * GIB, GIB)).code is ExitCode.NO_FIT
    warnings = check_memory(large(plan(H200), 126 * GIB, 2 * GIB))
    assert len(warnings) == 1 and "reduce memory" in warnings[0]
    assert check_memory(large(plan(H200), 100 * GIB, 2 * GIB)) == []


def test_kv_bytes_that_are_asked_for_count_and_are_refused_where_they_do_not_fit(plan: Any) -> None:
    found = plan(SPARK, NIBBLE_KV_CACHE_BYTES=str(95 * GIB))
    assert found.args[KV].value == 95 * GIB
    assert "a smaller NIBBLE_KV_CACHE_BYTES" in refusal(found).line()


def test_the_reserve_is_an_option_and_at_most_an_eighth_of_a_small_machine_by_default(
    plan: Any,
) -> None:
    assert plan(SPARK, NIBBLE_MEMORY_RESERVE_GIB="20").budget.allowed_bytes == 81 * GIB
    small = replace(SPARK, memory_total_bytes=16 * GIB, memory_available_bytes=15 * GIB)
    assert plan(small).budget.reserve_bytes == 2 * GIB
    assert plan(small, NIBBLE_MEMORY_RESERVE_GIB="8").budget.reserve_bytes == 8 * GIB


def test_a_shorter_context_of_the_ladder_is_one_that_fits(plan: Any) -> None:
    """The number it names is taken at its word: a plan with it is not refused."""
    here = replace(SPARK, memory_total_bytes=16 * GIB, memory_available_bytes=9 * GIB)
    error = refusal(plan(here))
    named = re.search(r"MAX_MODEL_LEN=(\d+)", error.line())
    assert named and int(named[1]) > 1024
    assert check_memory(plan(here, MAX_MODEL_LEN=named[1])) == []


def test_a_refusal_is_about_one_sequence_and_a_plan_about_all(plan: Any) -> None:
    tight = replace(SPARK, memory_total_bytes=16 * GIB, memory_available_bytes=9 * GIB)
    assert "MAX_NUM_SEQS" not in refusal(plan(tight)).line()
    found = plan(SPARK, MAX_NUM_SEQS="64", MAX_MODEL_LEN="2097152")
    first = found.ladder[0]
    assert (first.what, first.frees_bytes) == ("MAX_NUM_SEQS=1", 63 * found.budget.sequence_bytes)


def test_the_legacy_variable_for_kv_space_on_the_cpu_counts_since_it_wins_inside_vllm(
    plan: Any,
) -> None:
    here = replace(SPARK, gpus=(), memory_total_bytes=24 * GIB, memory_available_bytes=20 * GIB)
    found = plan(here, VLLM_CPU_KVCACHE_SPACE="3", NIBBLE_KV_CACHE_BYTES=str(1 << 30))
    assert found.args[KV].value == 3 * GIB and "VLLM_CPU_KVCACHE_SPACE" in found.args[KV].source
    assert refusal(plan(here, VLLM_CPU_KVCACHE_SPACE="30")).code is ExitCode.NO_FIT


def test_ranks_of_a_model_on_the_cpu_share_one_memory(plan: Any) -> None:
    here = replace(SPARK, gpus=(), memory_total_bytes=24 * GIB, memory_available_bytes=20 * GIB)
    one, two = plan(here), plan(here, TENSOR_PARALLEL_SIZE="2")
    assert two.budget.engine_bytes == 2 * one.budget.engine_bytes
    assert two.budget.weights_bytes >= one.budget.weights_bytes
    both = plan(here, "--data-parallel-size", "2")
    assert both.budget.weights_bytes == 2 * one.budget.weights_bytes
    assert both.args[KV].value <= one.args[KV].value  # for each
