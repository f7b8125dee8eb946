"""Several models on one port with real engines: together, then by turns.

The unit test test_fleet_routing.py has the rest with stand-ins for the engines.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.gate.sleep import SLEEP_PATH, WAKE_PATH
from nibble.machine.process_table import processes
from tests.support.bad_input.several import room_for_one
from tests.support.servers.browser import browser, find_chromium
from tests.support.servers.memory_cgroup import MIB, Hog, MemoryCgroup
from tests.support.servers.serving import START_TIMEOUT_S, Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # five starts
KEY = "nbl-the-key-of-two-models"
WORDS = ("serve", "small=nibble-demo", "nibble-demo-nvfp4", "--enforce-eager")
QUESTION = {"messages": [{"role": "user", "content": "What is NVFP4?"}], "max_tokens": 4}


LIMIT_MIB = 6500
# No new requests below 400 MiB; below 200, an engine ends
RESERVE = {"NIBBLE_MEMORY_RESERVE_GIB": str(800 / 1024)}


class Several(Server):
    """A server whose engines are those of its models."""

    def models(self) -> dict[str, dict[str, Any]]:
        return {one["model"]: one for one in self.status_of_all()["models"]}

    def status_of_all(self) -> dict[str, Any]:
        status, body = self._get(self.control_port, "/status")
        assert status == 200
        return json.loads(body)

    def status(self) -> dict[str, Any] | None:
        return None

    def chat(self, model: str) -> tuple[int, str]:
        status, answer = self.ask(
            "/v1/chat/completions", {"model": model, **QUESTION}, KEY, START_TIMEOUT_S
        )
        text = answer["choices"][0]["message"]["content"] if status == 200 else str(answer)
        return status, text


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Several]]:
    servers: list[Several] = []

    def begin(*flags: str, before: Sequence[str] = (), **environ: str) -> Several:
        servers.append(Several(tmp_path / "server", [*WORDS, *flags], before, **environ))
        return servers[-1]

    yield begin
    for server in servers:
        server.end()


def wait_for(done: Callable[[], bool], server: Server, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, server.log()[-3000:]
        time.sleep(0.2)


def test_two_models_answer_on_one_port_and_a_dead_engine_takes_only_its_own_down(
    start: Callable[..., Several], tmp_path: Path
) -> None:
    server = start(NIBBLE_API_KEY=KEY)
    server.wait_until_ready()
    assert server.ask("/v1/models")[0] == 401
    for name in ("small", "nibble-demo", "default", "nibble-demo-nvfp4"):
        assert server.chat(name) == (200, "NVFP4 is a")
    status, text = server.chat("nope")
    assert status == 404 and "small, nibble-demo, nibble-demo-nvfp4, default" in text
    if find_chromium():
        with browser(tmp_path / "profile") as page:
            page.open(f"http://127.0.0.1:{server.control_port}/")
            page.wait(lambda: page.text("#state") == "ready", 30)
            rows = page.text("#models")
            assert "small, nibble-demo" in rows and rows.count("ready") == 2
    engine = server.models()["nibble-demo"]["engine_pid"]
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: server.models()["nibble-demo"]["state"] != "ready", server)
    assert server.chat("nibble-demo-nvfp4")[0] == 200
    assert server.models()["nibble-demo-nvfp4"]["failures"] == 0
    assert server.chat("small") == (200, "NVFP4 is a")  # waits for the restart
    pids = [one["pid"] for one in server.models().values()]
    server.signal()
    assert server.wait(90) == 0
    assert not {one.pid for one in processes()} & set(pids)


def test_models_that_do_not_fit_together_are_loaded_by_turns(
    start: Callable[..., Several],
) -> None:
    server = start("--loading", "on-demand", NIBBLE_API_KEY=KEY, GPU_MEMORY_UTIL=room_for_one())
    server.wait_until_ready()
    assert {one["state"] for one in server.models().values()} == {"unloaded"}
    assert server.chat("small") == (200, "NVFP4 is a")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(server.chat, ("nibble-demo-nvfp4", "nibble-demo-nvfp4")))
    assert answers == [(200, "NVFP4 is a")] * 2
    found = server.models()
    assert (found["nibble-demo"]["state"], found["nibble-demo"]["pid"]) == ("unloaded", None)
    status = server.status_of_all()
    assert status["planned_bytes"] <= status["allowed_bytes"]
    server.signal()
    assert server.wait(90) == 0


@pytest.fixture
def hog() -> Iterator[tuple[Hog, MemoryCgroup]]:
    try:
        cgroup = MemoryCgroup("several", LIMIT_MIB)
    except OSError as error:
        pytest.skip(f"no memory cgroup may be made here ({error})")
    made = Hog(cgroup)
    yield made, cgroup
    made.end()
    cgroup.remove()


def test_when_memory_runs_out_one_engine_ends_and_the_other_serves_on(
    start: Callable[..., Several], hog: tuple[Hog, MemoryCgroup]
) -> None:
    taker, cgroup = hog
    server = start(before=cgroup.words, NIBBLE_API_KEY=KEY, **RESERVE)
    server.wait_until_ready()
    assert server.chat("small")[0] == 200  # so that the other is the least used

    def available_mib() -> int:
        return server.status_of_all()["memory"]["available_bytes"] // MIB

    taker.take(max(1, available_mib() - 300))
    wait_for(lambda: server.status_of_all()["state"] == "paused", server, 30)
    assert server.chat("small")[0] == server.chat("nibble-demo-nvfp4")[0] == 503
    assert {one["state"] for one in server.models().values()} == {"ready"}
    taker.take(max(1, available_mib() - 150))
    wait_for(lambda: server.models()["nibble-demo-nvfp4"]["state"] == "holding", server, 30)
    taker.take(-1)
    wait_for(lambda: server.chat("small")[0] == 200, server, 30)
    status, text = server.chat("nibble-demo-nvfp4")
    assert status == 503 and "nibble ended it because memory ran out" in text
    assert server.models()["nibble-demo"]["failures"] == 0
    assert server.process.poll() is None


def test_a_real_engine_sleeps_and_wakes_through_the_gate_alone(tmp_path: Path) -> None:
    """vLLM's CPU worker keeps its memory, but its engine pauses and goes on as on a GPU."""
    token = {"NIBBLE_WATCHED_ABOVE": "1", "NIBBLE_GATE_INTERNAL": "token-of-the-test"}
    server = Server(
        tmp_path, ["serve", "nibble-demo", "--enforce-eager"], NIBBLE_HANG_SECONDS="5", **token
    )

    def turn(path: str, given: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", path, headers={"x-nibble-internal": given})
        return connection.getresponse().status

    def ask() -> str:
        return server.ask("/v1/chat/completions", {"model": "default", **QUESTION})[1]["choices"][
            0
        ]["message"]["content"]

    try:
        server.wait_until_ready()
        assert turn(SLEEP_PATH, "another-token") == 404
        assert turn(SLEEP_PATH, token["NIBBLE_GATE_INTERNAL"]) == 200
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask)
            time.sleep(8)  # longer than the limit of a hang
            assert not waiting.done() and server.process.poll() is None
            assert turn(WAKE_PATH, token["NIBBLE_GATE_INTERNAL"]) == 200
            assert waiting.result(30) == "NVFP4 is a"
        server.signal()
        assert server.wait(90) == 0
    finally:
        server.end()
