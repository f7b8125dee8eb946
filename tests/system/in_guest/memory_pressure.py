"""In a guest (tests/system/test_memory_in_a_guest.py): a neighbour takes a real server's memory.

GB10's memory profile is forced. The limit is that of a cgroup v2 which both share, or the guest's
memory. Swap is on, and must stay unused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nibble.machine.processes import OOM_SCORE_STEP
from tests.support.servers.memory_cgroup import MIB, Hog
from tests.support.servers.serving import Server
from tests.support.servers.unified_profile import force_unified_memory
from tests.support.system.groups import Group
from tests.support.vllm_plugins import one_memory_node
from tests.support.vllm_plugins.install import install

LIMIT_MIB = 2400
# No new requests below 300 MiB, the engine is stopped below 150, resumed from 450.
RESERVE = {"NIBBLE_MEMORY_RESERVE_GIB": str(600 / 1024)}
STEP_MIB = 25
FLAGS = ("--enforce-eager", "--max-model-len", "512")


def swapped_out() -> int:
    found = re.search(r"^pswpout (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    assert found is not None
    return int(found[1])


@pytest.fixture(params=["memory.max", "memory.high", "machine"])
def limit(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def groups(limit: str) -> tuple[Group, Group]:
    """One for the server and one for its neighbour, below one that has the limit."""
    root = Group.controlled()
    root.set("cgroup.subtree_control", "+memory")
    both = Group(root.folder / f"both-{limit}")
    if limit != "machine":
        both.set(limit, str(LIMIT_MIB * MIB))
    both.set("cgroup.subtree_control", "+memory")
    return Group(both.folder / "nibble"), Group(both.folder / "neighbour")


@pytest.fixture
def neighbour(groups: tuple[Group, Group]) -> Iterator[Hog]:
    hog = Hog(groups[1])  # type: ignore[arg-type]
    yield hog
    hog.end()


@pytest.fixture
def server(groups: tuple[Group, Group], neighbour: Hog, tmp_path: Path) -> Iterator[Server]:
    environ = {**RESERVE, **force_unified_memory(tmp_path), "GPU_MEMORY_UTIL": "0.9"}
    install(tmp_path / "plugin", one_memory_node)
    words = ["serve", "nibble-demo-nvfp4", *FLAGS]
    made = Server(tmp_path, words, before=groups[0].words, **environ)
    yield made
    made.end()


def take_until(neighbour: Hog, server: Server, is_done: Callable[[], bool]) -> None:
    """To above the first limit at once, then in steps slower than the watchdog looks."""
    status = server.status()
    assert status is not None
    neighbour.take(max(1, status["memory"]["available_bytes"] // MIB - 400))
    for _ in range(4000 // STEP_MIB):
        if is_done():
            return
        neighbour.take(STEP_MIB)
        time.sleep(0.5)
    raise AssertionError("memory was taken and nothing happened")


def test_the_watchdog_acts_before_the_guest_swaps_and_only_our_server_ends(
    server: Server, neighbour: Hog, groups: tuple[Group, Group], limit: str
) -> None:
    swaps = Path("/proc/swaps").read_text().splitlines()
    assert len(swaps) == 2  # a heading and one
    server.wait_until_ready()
    status = server.status()
    assert status is not None
    memory, budget = status["memory"], status["plan"]["budget"]
    where = "MemAvailable" if limit == "machine" else f"cgroup {groups[0].folder.parent}"
    assert memory["limited_by"] == budget["limited_by"] == where
    if limit != "machine":
        assert memory["total_bytes"] == budget["memory_bytes"] == LIMIT_MIB * MIB
    engine = server.engine_processes()[0].pid
    scores = [
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (engine, server.process.pid)
    ]
    assert scores[0] - scores[1] == OOM_SCORE_STEP
    before = swapped_out()

    take_until(neighbour, server, lambda: (server.status() or {}).get("state") == "paused")
    assert server.ask("/v1/models")[0] == 503 and not server.is_ready()
    neighbour.take(-1)
    server.wait_until_ready()
    body = {"model": "default", "prompt": "word1", "max_tokens": 1}
    assert server.ask("/v1/completions", body)[0] == 200

    take_until(neighbour, server, lambda: server.process.poll() is not None)
    assert server.wait(20) == 7
    assert swapped_out() == before
    assert server.engine_processes() == []
    assert neighbour.process.poll() is None
    assert groups[1].field("memory.events", "oom_kill") == 0
    assert "oom_kill 0\n" in Path("/proc/vmstat").read_text()
    last = server.err.read_text().splitlines()[-1]
    pattern = (
        rf"^nibble: error: stopped the engine in phase ready: 0\.\d+ GiB.*\({re.escape(where)}\)"
    )
    assert re.search(pattern, last), last
