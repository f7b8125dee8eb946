"""/dev/shm: which queues a plan gets, what is refused before a load, and that the plan, the
checks and the doctor agree.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nibble.cli.doctor import checks as doctor
from nibble.cli.doctor.checks import shm_check
from nibble.cli.doctor.machine import model_checks
from nibble.errors import ExitCode, NibbleError
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.plan.shared_memory import MIB, VARIABLE, check_shared_memory, needed_bytes
from nibble.plan.topology import Topology
from nibble.serve.preflight import machine as checks
from nibble.serve.preflight.machine import run_checks
from tests.support.models.tiny_model import write_model
from tests.support.servers.serving import free_port

DOCKERS = 64 * MIB
ONE = Topology("machine", 1, 1, 1, 0, None, "")
TWO = Topology("machine", 2, 2, 1, 0, None, "")
RAY = Topology("ray", 2, 1, None, 0, "10.0.0.1", "")
# Alone it shares a process with the engine, so that no queue is between them.
WORKER_APART = ("--target", "cpu", "--distributed-executor-backend", "mp")
FIRST_OF_TWO = Topology("mp", 2, 1, 2, 0, "10.0.0.1", "")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what plan, checks and doctor find free in /dev/shm."""

    def use(count: int | None) -> None:
        for module in (prepare, checks, doctor):
            monkeypatch.setattr(module, "shm_free_bytes", lambda: count)

    return use


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("shm") / "m"))


def plan(model: str, *words: str, **environ: str) -> Plan:
    return plan_for(read_wishes([model, *words], {"PATH": os.environ["PATH"], **environ}))


@pytest.mark.parametrize("mib", [24, 64, 256, 399])
def test_one_cpu_worker_gets_small_queues_where_vllms_own_would_not_fit(
    model: str, free: Any, mib: int
) -> None:
    free(mib * MIB)
    chunk = plan(model, *WORKER_APART).env[VARIABLE]
    assert (chunk.value, chunk.source) == (1, "nibble's default")
    assert f"/dev/shm has {mib} MiB free" in chunk.reason


@pytest.mark.parametrize(
    ("mib", "words"),
    [
        (400, [*WORKER_APART]),
        (None, [*WORKER_APART]),
        (24, ["--target", "cpu"]),  # engine and worker are one process
        (64, ["--target", "cpu", "--tensor-parallel-size", "2"]),  # too little anyway, see below
        (64, ["--target", "cpu", "--data-parallel-size", "2"]),
        (
            64,
            ["--target", "hopper"],
        ),  # engine and worker are one process, and hopper is another machine here
    ],
)
def test_queues_stay_vllms_own_elsewhere(
    model: str, free: Any, mib: int | None, words: list[str]
) -> None:
    free(mib and mib * MIB)
    assert VARIABLE not in plan(model, *words).env


def test_a_users_own_size_wins(model: str, free: Any) -> None:
    free(DOCKERS)
    found = plan(model, *WORKER_APART, **{VARIABLE: "3"})
    assert found.vllm_environ({VARIABLE: "3"})[VARIABLE] == "3"
    assert found.env[VARIABLE].source == f"environment {VARIABLE}"


def test_what_vllm_needs_follows_its_queues() -> None:
    small, plain = {VARIABLE: "1"}, {}
    assert needed_bytes(ONE, small, plugin_sizes_answers=True) == 20 * MIB
    assert needed_bytes(ONE, {VARIABLE: "6"}, plugin_sizes_answers=True) == 60 * MIB
    assert needed_bytes(ONE, small, plugin_sizes_answers=False) == 240 * MIB
    assert needed_bytes(TWO, plain, plugin_sizes_answers=True) == 496 * MIB
    assert needed_bytes(RAY, plain, plugin_sizes_answers=True) == 240 * MIB
    assert needed_bytes(FIRST_OF_TWO, plain, plugin_sizes_answers=True) == 160 * MIB


def test_too_little_is_refused_with_the_option_and_little_is_a_warning_for_several() -> None:
    for free_bytes in (DOCKERS, None):
        with pytest.raises(NibbleError) as refused:
            check_shared_memory(free_bytes, 496 * MIB, 2)
        assert refused.value.code is ExitCode.NO_FIT
        assert "but vLLM needs 496 MiB there for 2 workers" in refused.value.line()
        assert (
            "--shm-size 1g or --ipc host" in refused.value.line()
            and "emptyDir" in refused.value.line()
        )
    (warning,) = check_shared_memory(512 * MIB, 496 * MIB, 2)
    assert "only 512 MiB free for 2 workers" in warning and "--shm-size 1g" in warning
    assert check_shared_memory(256 * MIB, 20 * MIB, 1) == []
    assert check_shared_memory(1 << 30, 240 * MIB, 8) == []


def test_a_start_and_the_doctor_say_the_same(model: str, free: Any, tmp_path: Path) -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "NIBBLE_CACHE_DIR": str(tmp_path),
        "NIBBLE_TARGET": "cpu",
    }
    environ |= {
        "HOME": str(tmp_path),
        "PORT": str(free_port()),
        "NIBBLE_CONTROL_PORT": str(free_port()),
    }
    free(DOCKERS)
    alone = run_checks(plan(model, **environ), environ)
    assert not [line for line in alone if "/dev/shm" in line]
    assert not any(VARIABLE in check.what for check in model_checks(model, environ))
    environ["VLLM_EXTRA_ARGS"] = "--distributed-executor-backend mp"
    started = run_checks(plan(model, **environ), environ)
    assert not [line for line in started if "/dev/shm" in line]
    assert any(f"{VARIABLE}=1" in check.what for check in model_checks(model, environ))
    environ["TENSOR_PARALLEL_SIZE"] = "2"
    with pytest.raises(NibbleError) as refused:
        run_checks(plan(model, **environ), environ)
    assert refused.value.code is ExitCode.NO_FIT
    (found,) = model_checks(model, environ)
    assert (
        found.status == "fail"
        and refused.value.what in found.what
        and found.fix == refused.value.action
    )


def test_the_doctor_without_a_model_says_for_how_many_workers_it_is_enough() -> None:
    assert shm_check(1 << 30, 8).status == "ok"
    one = shm_check(DOCKERS, 1)
    assert one.status == "ok" and one.what.endswith(
        "64 MiB free: enough for one worker, too little for several"
    )
    several = shm_check(DOCKERS, 2)
    assert several.status == "warning" and "--shm-size 1g" in several.fix
    assert shm_check(None, 0).status == shm_check(8 * MIB, 0).status == "warning"
