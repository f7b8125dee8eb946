"""The cores and threads of a model on the CPU, from files as the kernel writes them, and what the
plan makes of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.machine.cpus import ComputeCores, compute_cores
from nibble.plan.choice import Choice
from nibble.plan.cpu_engine import (
    BATCHED_TOKENS,
    BIND,
    ONE_PROCESS,
    SPINS,
    START_METHOD,
    THREADS,
    cpu_environment,
    layer_operators,
    prompt_chunk,
)
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_model import write_model

SYSTEM = "sys/devices/system"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def topology(root: Path, *cores: str, nodes: tuple[str, ...] = ()) -> Path:
    """A machine: the logical CPUs of each physical core ("0,4"), and of each NUMA node."""
    for core in cores:
        for cpu in core.split(","):
            write(root, f"{SYSTEM}/cpu/cpu{cpu}/topology/thread_siblings_list", core)
    for number, node in enumerate(nodes):
        write(root, f"{SYSTEM}/node/node{number}/cpulist", node)
    return root


def quota(root: Path, path: str, text: str) -> None:
    """`cpu.max` of a cgroup v2 below /sys/fs/cgroup, which this process is in."""
    write(root, "proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    write(root, "proc/self/cgroup", "0::/box/inner")
    (root / "sys/fs/cgroup/box/inner").mkdir(parents=True, exist_ok=True)
    write(root, f"sys/fs/cgroup/{path}cpu.max", text)


FOUR = ("0,4", "1,5", "2,6", "3,7")


def test_a_thread_for_each_physical_core_and_not_for_its_sibling(tmp_path: Path) -> None:
    found = compute_cores(topology(tmp_path, *FOUR, nodes=("0-7",)), range(8))
    assert found == ComputeCores(tuple(range(8)), 4, "4 physical cores")


@pytest.mark.parametrize(
    ("allowed", "threads", "cpus"),
    [((0, 1), 2, (0, 1)), ((0, 4), 1, (0, 4)), ((6,), 1, (6,)), ((1, 5, 7), 2, (1, 5, 7))],
)
def test_affinity_leaves_its_cores(
    tmp_path: Path, allowed: tuple[int, ...], threads: int, cpus: tuple[int, ...]
) -> None:
    found = compute_cores(topology(tmp_path, *FOUR, nodes=("0-7",)), allowed)
    assert (found.threads, found.cpus) == (threads, cpus)


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("150000 100000", 2),
        ("100000 100000", 1),
        ("20000 100000", 1),
        ("240000 100000", 2),
        ("800000 100000", 4),
        ("max 100000", 4),
    ],
)
@pytest.mark.parametrize("place", ["box/inner/", "box/"])
def test_a_quota_of_the_cgroup_or_above_it_limits_the_threads(
    tmp_path: Path, text: str, threads: int, place: str
) -> None:
    quota(topology(tmp_path, *FOUR), place, text)
    found = compute_cores(tmp_path, range(8))
    assert (found.threads, found.cpus) == (threads, tuple(range(8)))
    assert ("quota" in found.reason) is (threads < 4)


def test_the_quota_of_cgroup_v1(tmp_path: Path) -> None:
    topology(tmp_path, *FOUR)
    write(tmp_path, "proc/self/mountinfo", "30 1 0:26 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct")
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/")
    write(tmp_path, "cg/cpu/cpu.cfs_quota_us", "300000")
    write(tmp_path, "cg/cpu/cpu.cfs_period_us", "100000")
    assert compute_cores(tmp_path, range(8)).threads == 3
    write(tmp_path, "cg/cpu/cpu.cfs_quota_us", "-1")
    assert compute_cores(tmp_path, range(8)).threads == 4


def test_one_numa_node_of_several(tmp_path: Path) -> None:
    topology(tmp_path, *FOUR, nodes=("0,4", "1-3,5-7"))
    found = compute_cores(tmp_path, range(8))
    assert (found.threads, found.cpus) == (3, (1, 2, 3, 5, 6, 7))
    assert found.reason == "3 physical cores, on one NUMA node of 4"
    assert found.numa_nodes == 2
    assert compute_cores(tmp_path, (0, 4)).numa_nodes == 1


def test_efficient_cores_are_left_out(tmp_path: Path) -> None:
    topology(tmp_path, "0,1", "2,3", "4", "5")
    write(tmp_path, "sys/devices/cpu_core/cpus", "0-3")
    found = compute_cores(tmp_path, range(6))
    assert (found.threads, found.cpus) == (2, (0, 1, 2, 3))
    assert found.reason == "2 physical cores, the fast ones of 4"
    assert compute_cores(tmp_path, (4, 5)).threads == 2  # it has no other


def test_arm_cores_of_half_the_capacity_are_left_out(tmp_path: Path) -> None:
    topology(tmp_path, "0", "1", "2", "3")
    for cpu, capacity in enumerate((512, 512, 1024, 980)):
        write(tmp_path, f"{SYSTEM}/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert compute_cores(tmp_path, range(4)).cpus == (2, 3)


def test_a_machine_that_says_nothing_gives_a_thread_for_each_cpu(tmp_path: Path) -> None:
    assert compute_cores(tmp_path, (0, 3)) == ComputeCores((0, 3), 2, "2 physical cores")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("cores") / "m"))


def plan(model: str, *words: str, **environ: str) -> Plan:
    environ = {"PATH": "/usr/bin:/bin", "NIBBLE_TARGET": "cpu", **environ}
    wishes = read_wishes([model, *words], environ)
    return plan_for(wishes)


def test_the_plan_has_one_process_with_a_thread_for_each_core(model: str) -> None:
    found, cores = plan(model), compute_cores()
    shown = {name: found.env[name].value for name in (ONE_PROCESS, START_METHOD, THREADS)}
    assert shown == {ONE_PROCESS: "0", START_METHOD: "fork", THREADS: str(cores.threads)}
    assert cores.reason in found.env[THREADS].reason


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--distributed-executor-backend", "mp"], {}),
        (["--api-server-count", "2"], {}),
        ([], {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}),
        ([], {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}),
        ([], {ONE_PROCESS: "1"}),
    ],
)
def test_where_several_processes_are_wanted_vllms_own_way_stays(
    model: str, words: list[str], environ: dict[str, str]
) -> None:
    found = plan(model, *words, **environ)
    assert THREADS not in found.env and START_METHOD not in found.env


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--data-parallel-size"])
def test_ranks_that_are_more_than_the_numa_nodes_share_the_cores(
    model: str, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    cores = ComputeCores((0, 1, 2, 3), 4, "4 physical cores")
    monkeypatch.setattr("nibble.machine.hardware.compute_cores", lambda: cores)
    found = plan(model, flag, "2").env
    assert (found[BIND].value, found[THREADS].value) == ("nobind", "2")
    assert found[BIND].reason == "vLLM binds one rank to a NUMA node; 2 ranks share 1 NUMA node"
    assert BIND not in plan(model, flag, "2", VLLM_CPU_OMP_THREADS_BIND="0|1").env
    monkeypatch.setattr(
        "nibble.machine.hardware.compute_cores", lambda: replace(cores, numa_nodes=2)
    )
    assert BIND not in plan(model, flag, "2").env


def test_a_users_number_of_threads_wins(model: str) -> None:
    chosen = plan(model, OMP_NUM_THREADS="1")
    assert chosen.vllm_environ({"OMP_NUM_THREADS": "1"})[THREADS] == "1"


def chunk(
    step_bytes: int, threads: int = 2, device: str = "cpu", flags: Any = None, **config: Any
) -> int | None:
    """The tokens of a step for a model whose decode step reads `step_bytes`."""
    checkpoint = SimpleNamespace(
        weights=SimpleNamespace(decode_bytes_per_step=step_bytes),
        architecture=config.pop("architecture", "LlamaForCausalLM"),
        has_vision=config.pop("has_vision", False),
        text_config=config,
    )
    inputs: Any = SimpleNamespace(
        target=SimpleNamespace(device=device),
        checkpoint=checkpoint,
        hardware=SimpleNamespace(compute=ComputeCores((0, 1), threads, "cores")),
    )
    given = {name: Choice(value, "command line") for name, value in (flags or {}).items()}
    found = prompt_chunk(inputs, given).get(BATCHED_TOKENS)
    return None if found is None else found.value


def test_a_chunk_of_a_prompt_takes_about_a_second() -> None:
    one_gb = 10**9
    assert chunk(one_gb // 8) == 896  # 2 cores x 60e9 / bytes, a multiple of 128
    assert chunk(one_gb, threads=16) == 896
    assert chunk(one_gb) == chunk(100 * one_gb) == 256
    assert chunk(one_gb // 100) is None  # vLLM's own 2048 take less than a second
    assert chunk(one_gb, flags={"--max-num-seqs": 300}) == 300


@pytest.mark.parametrize(
    "more",
    [
        {"device": "cuda"},
        {"has_vision": True},
        {"architecture": "BertModel"},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"flags": {"--enable-chunked-prefill": False}},
        {"flags": {"--spec-method": "mtp"}},
    ],
)
def test_where_only_vllm_knows_the_minimum_its_number_stays(more: dict[str, Any]) -> None:
    assert chunk(10**9) == chunk(10**9, layer_types=["full_attention"]) == 256
    assert chunk(10**9, **more) is None


def test_a_users_batched_tokens_win(model: str) -> None:
    assert BATCHED_TOKENS not in plan(model).args  # a model of kilobytes
    assert plan(model, BATCHED_TOKENS, "77").args[BATCHED_TOKENS].value == "77"


@pytest.mark.vllm
def test_vllms_warnings_about_what_nibble_sets_stay_out_of_the_log_and_others_do_not() -> None:
    import inspect
    import logging

    from vllm.engine import arg_utils
    from vllm.utils import torch_utils

    from nibble.engine.plugin.cpu_process import _INTENDED, leave_out_intended

    leave_out_intended()
    for module in (arg_utils, torch_utils):
        beginning, logger = _INTENDED[module.__name__], logging.getLogger(module.__name__)
        assert beginning in inspect.getsource(module)
        for message, is_shown in ((beginning + " to 0", False), ("Another warning", True)):
            record = logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None)
            assert bool(logger.filter(record)) is is_shown


def eager(flags: Any = None, **changed: Any) -> bool:
    """Whether a plan for the CPU leaves compilation out, and its OpenMP threads short waits."""
    scheme = {"is_nvfp4": True, "vllm_quantization": "modelopt_fp4", "name": "NVFP4"}
    checkpoint = SimpleNamespace(
        scheme=SimpleNamespace(**{name: changed.pop(name, scheme[name]) for name in scheme}),
        architecture=changed.pop("architecture", "Qwen3ForCausalLM"),
        text_config={"torch_dtype": changed.pop("dtype", "bfloat16")},
    )
    inputs: Any = SimpleNamespace(
        target=SimpleNamespace(device=changed.pop("device", "cpu")),
        checkpoint=checkpoint,
        environ={},
        hardware=SimpleNamespace(compute=None),
    )
    topology: Any = SimpleNamespace(mode="machine", ranks=1, ranks_here=1)
    assert not changed
    given = {name: Choice(value, "command line") for name, value in (flags or {}).items()}
    found = layer_operators(inputs, given)
    variables = cpu_environment(inputs, found | given, topology)
    is_eager = {**found, **given}.get("--enforce-eager", Choice(False, "")).value
    assert (SPINS in variables) == bool(found and is_eager)
    return bool(found)


def test_layers_that_a_few_operators_compute_are_not_compiled() -> None:
    assert eager()
    assert eager(architecture="LlamaForCausalLM", vllm_quantization="compressed-tensors")
    assert eager({"--no-enforce-eager": True, "--dtype": "auto", "--enable-lora": False})
    assert eager({"--enforce-eager": False})  # the user's own value wins over the plan's


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "cuda"},
        {"is_nvfp4": False},
        {"architecture": "Qwen3MoeForCausalLM"},
        {"vllm_quantization": "modelopt_mixed"},
        {"name": "NVFP4+FP8"},
        {"dtype": "float16"},
        {"flags": {"--dtype": "float32"}},
        {"flags": {"--enable-lora": True}},
        {"flags": {"--compilation-config": {"mode": 3}}},
        {"flags": {"--linear-backend": "emulation"}},
        {"flags": {"--tensor-parallel-size": 2}},
    ],
)
def test_other_layers_are_compiled(changed: dict[str, Any]) -> None:
    assert not eager(**changed)
