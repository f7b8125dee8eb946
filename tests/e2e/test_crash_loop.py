"""The crash-loop breaker around real starts: what counts, the wait, the end with 75, and what
starts afresh.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.serving import Server

pytestmark = pytest.mark.vllm
Start = Callable[..., Server]
OTHER = {"at_s": 0.0, "code": 10, "cause": "vLLM ended by itself in phase load", "process": ""}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts of the demo that share one cache."""
    servers: list[Server] = []

    def begin(**environ: str) -> Server:
        shared = {"NIBBLE_CACHE_DIR": str(tmp_path / "cache"), **environ}
        servers.append(Server(tmp_path / str(len(servers)), ["serve", "nibble-demo"], **shared))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


def raw_status(server: Server) -> dict[str, Any] | None:
    """/status, also where there is no engine yet."""
    try:
        return json.loads(server._get(server.control_port, "/status")[1])
    except OSError:
        return None


def kill_the_api_server(server: Server) -> None:
    server.engine_pid = pid = server._wait(lambda: (raw_status(server) or {}).get("engine_pid"), 40)
    assert pid
    os.kill(pid, signal.SIGKILL)


def record(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache" / "crash-loop").glob("*.json")
    return found


def write(path: Path, count: int, last_age_s: float) -> None:
    now = time.time()
    entries: list[dict[str, Any]] = [
        {**OTHER, "at_s": now - last_age_s - 60 * back} for back in reversed(range(count))
    ]
    path.write_text(json.dumps({"model": "nibble-demo", "failures": entries}))


def test_failed_starts_are_held_back_and_end_with_75_until_the_record_is_removed(
    start: Start, tmp_path: Path
) -> None:
    first = start()
    kill_the_api_server(first)
    assert first.wait(15) == 10
    last = first.err.read_text().splitlines()[-1]
    assert re.search(r"vLLM ended by itself in phase start \(API server killed by SIGKILL\)", last)
    assert first.engine_processes() == []
    (entry,) = json.loads(record(tmp_path).read_text())["failures"]
    assert entry["code"] == 10 and "killed by SIGKILL" in entry["cause"] and entry["process"] == ""

    write(record(tmp_path), 5, last_age_s=892)  # of 900 s to wait
    held = start()
    found = held._wait(lambda: raw_status(held), 20)
    assert found["state"] == "holding" and "5 starts in a row failed" in found["detail"]
    assert not held.is_ready()
    kill_the_api_server(held)
    assert held.wait(15) == 10
    assert any(
        re.search(r"5 starts in a row failed, the next is in \d s; the last failed with: vLLM", s)
        for s in held.said()
    )

    ended = start()
    assert ended.wait(20) == 75
    last = ended.err.read_text().splitlines()[-1]
    assert re.search(
        r"6 starts in a row failed, the last with: vLLM ended by itself.* remove \S+\.json", last
    )

    changed = start(MAX_NUM_SEQS="2")
    changed.wait_for_status()
    changed.signal()
    assert (
        changed.wait(20) == 0
    )  # another setting starts at once; SIGTERM does not count as a failure
    record(tmp_path).unlink()
    again = start()
    again.wait_for_status()
    again.signal()
    assert again.wait(20) == 0
    assert not list((tmp_path / "cache" / "crash-loop").glob("*.json"))


def test_a_signal_during_the_wait_ends_it_with_0(start: Start, tmp_path: Path) -> None:
    first = start()
    kill_the_api_server(first)
    assert first.wait(15) == 10
    write(record(tmp_path), 3, last_age_s=0)
    held = start()
    held._wait(lambda: any("starts in a row failed" in line for line in held.said()) or None, 20)
    held.signal()
    assert held.wait(10) == 0
    assert json.loads(record(tmp_path).read_text())["failures"][-1]["code"] == 10
