"""GB10's memory profile forced on the CPU, in a real cgroup: budget, vLLM's own check at start,
watchdog, refusal.
"""

from __future__ import annotations

import http.client
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble.machine.processes import OOM_SCORE_STEP
from tests.support.models.slow_model import make_slow_model
from tests.support.paths import ROOT
from tests.support.servers.memory_cgroup import MIB, Hog, MemoryCgroup
from tests.support.servers.serving import Server
from tests.support.servers.unified_profile import force_unified_memory, what_was_checked

pytestmark = pytest.mark.vllm
FLAGS = ("--enforce-eager", "--max-model-len", "2048")
LIMIT_MIB = 3400
# No new requests below 400 MiB, the engine is stopped below 200, resumed from 600.
RESERVE = {"NIBBLE_MEMORY_RESERVE_GIB": str(800 / 1024)}
STEP_MIB = 50
OTHERS_MIB = 400  # taken before a start, so that less than vLLM's default of 0.92 is free
KV, UTILIZATION = "--kv-cache-memory-bytes", "--gpu-memory-utilization"


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    try:
        made = MemoryCgroup("governor", LIMIT_MIB)
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here ({error})")
    yield made
    made.remove()


@pytest.fixture
def hog(cgroup: MemoryCgroup) -> Iterator[Hog]:
    made = Hog(cgroup)
    yield made
    made.end()


@pytest.fixture
def server(cgroup: MemoryCgroup, hog: Hog, tmp_path: Path) -> Iterator[Server]:
    hog.take(OTHERS_MIB)
    model = make_slow_model(ROOT / ".cache" / "slow_model")
    forced = force_unified_memory(tmp_path)
    environ = {**RESERVE, **forced, "GPU_MEMORY_UTIL": "0.9"}
    made = Server(tmp_path, ["serve", str(model), *FLAGS], before=cgroup.words, **environ)
    yield made
    made.end()


def take_until(hog: Hog, server: Server, done: Callable[[], Any]) -> None:
    """Down to above the first limit at once, then in small steps, slower than the watchdog
    looks.
    """
    status = server.status()
    assert status is not None
    hog.take(max(1, status["memory"]["available_bytes"] // MIB - 650))
    for _ in range(LIMIT_MIB // STEP_MIB):
        if done():
            return
        hog.take(STEP_MIB)
        time.sleep(0.4)
    raise AssertionError("memory was taken and nothing happened")


def check_budget(plan: dict[str, Any], checked: dict[str, Any]) -> None:
    """Both flags come from one budget, GPU_MEMORY_UTIL=0.9 is a cap, and vLLM's check passed
    where 0.92 would not have.
    """
    budget, kv, utilization = plan["budget"], plan["args"][KV], plan["args"][UTILIZATION]
    assert budget["memory_bytes"] == LIMIT_MIB * MIB and budget["limited_by"].startswith("cgroup ")
    assert kv["source"] == utilization["source"] == "memory budget"
    assert "GPU_MEMORY_UTIL) is a cap" in utilization["reason"]
    assert budget["reserve_bytes"] == 800 * MIB
    assert (
        0
        < kv["value"]
        <= budget["room_bytes"]
        < budget["available_bytes"] - budget["reserve_bytes"]
    )
    assert (checked["kv"], checked["utilization"]) == (kv["value"], utilization["value"])
    assert checked["requested"] <= checked["free"] < 0.92 * checked["total"]


def state(server: Server) -> str:
    found = server.status()
    return found["state"] if found else ""


def test_admission_stops_comes_back_and_then_the_engine_is_stopped_and_the_supervisor_lives(
    server: Server, hog: Hog
) -> None:
    server.wait_until_ready()
    status = server.status()
    assert status is not None
    check_budget(status["plan"], what_was_checked(server.out.parent))
    memory = status["memory"]
    assert memory["limited_by"].startswith("cgroup ") and memory["action"] == "serve"
    assert memory["available_bytes"] > memory["resume_from_bytes"]
    ours, engine = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        for pid in (server.process.pid, server.engine_processes()[0].pid)
    )
    assert engine - ours == OOM_SCORE_STEP
    if os.geteuid() == 0:  # others may where RLIMIT_MEMLOCK lets them
        locked = re.search(
            r"VmLck:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text()
        )
        assert locked and int(locked[1]) > 10_000

    stream = server.stream(1200).wait_for(5)
    take_until(hog, server, lambda: state(server) == "paused")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/v1/completions", b"{}", {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
    assert re.search(
        r"does not admit new requests: memory is short: 0\.\d+ GiB, 0\.781 GiB are reserved",
        answer.read().decode(),
    )
    assert not server.is_ready() and server.ask("/ready")[0] == 503
    assert server.ask("/health")[0] == 503
    before = stream.chunks
    stream.wait_for(before + 20)  # what was let in goes on

    hog.take(-1)
    deadline = time.monotonic() + 30
    while not server.is_ready():
        assert time.monotonic() < deadline, server.said()
        time.sleep(0.2)
    body = {"model": "default", "prompt": "word1", "max_tokens": 1}
    assert server.ask("/v1/completions", body)[0] == 200

    take_until(hog, server, lambda: server.process.poll() is not None)
    assert server.wait(10) == 7
    assert server.engine_processes() == []
    assert hog.process.poll() is None  # nothing else was killed
    said, last = "\n".join(server.said()), server.err.read_text().splitlines()[-1]
    assert re.search(
        r"new requests get 503 until 0\.586 GiB are available(?s:.*)new requests are admitted"
        r" again",
        said,
    )
    assert re.search(
        r"^nibble: error: stopped the engine in phase ready: 0\.\d+ GiB of memory are available"
        r" \(cgroup \S+\), 0\.781 GiB "
        r"are reserved for the rest of the machine; expected at least 0\.195 GiB;"
        r" reduce memory, in this order: \S+",
        last,
    )
    assert "Traceback" not in said


# in two parts in tests/unit: test_launch.py stops during load, test_breaker.py counts
@pytest.mark.slow
def test_memory_that_runs_out_during_load_stops_the_engine_and_counts_as_a_failed_start(
    server: Server, hog: Hog
) -> None:
    server.wait_for_status()
    time.sleep(3)  # vLLM is importing
    take_until(hog, server, lambda: server.process.poll() is not None)
    assert server.wait(10) == 7
    assert server.engine_processes() == []
    assert "stopped the engine in phase" in server.err.read_text().splitlines()[-1]
    (record,) = (Path(server.environ["NIBBLE_CACHE_DIR"]) / "crash-loop").iterdir()
    assert '"code": 7' in record.read_text()


def test_what_cannot_fit_the_cgroup_is_refused_before_the_load(
    cgroup: MemoryCgroup, hog: Hog, tmp_path: Path
) -> None:
    hog.take(LIMIT_MIB - 1500)
    server = Server(
        tmp_path, ["serve", "nibble-demo"], before=cgroup.words, **force_unified_memory(tmp_path)
    )
    assert server.wait(30) == 7
    assert re.search(
        r"does not fit: weights .* = 2\.\d GiB needed; 1\.\d GiB available of 3\.3 GiB",
        server.log(),
    )
    assert "try, in this order: a higher limit of that cgroup, a smaller model" in server.log()
    assert not (Path(server.environ["NIBBLE_CACHE_DIR"]) / "crash-loop").exists()
