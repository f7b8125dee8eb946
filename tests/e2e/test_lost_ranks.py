"""Two ranks without Ray on one machine, and rank 1's part of vLLM is killed: who says what, how
soon, and how both end.

All tests here share one start, in the order of its life. tests/cluster has separate machines.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from test_two_ranks import RANK_1, Ranks

from tests.support.servers.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
HEARD_S = 5.0
DRAIN_S = 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    both = {
        "NIBBLE_DRAIN_SECONDS": str(DRAIN_S),
        "NIBBLE_CANARY": "off",
        "NIBBLE_CLUSTER_WAIT_SECONDS": "400",
    }
    found = Ranks(tmp_path_factory.mktemp("ranks"), flags=["--enforce-eager"], both=both)
    try:
        found.head.wait_until_ready()
        found.rank1.wait_until_ready()
        yield found
    finally:
        found.end()


class ControlPort:
    """Asks /status of a server 20 times a second, in a thread; `refused` counts what was not
    answered.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._over = server, threading.Event()
        self.asked = self.refused = 0
        self.states: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self.asked += 1
            told = self._server.status()
            self.refused += told is None
            if told is not None and (not self.states or self.states[-1] != told["state"]):
                self.states.append(told["state"])

    def end(self) -> None:
        self._over.set()
        self._thread.join(10)


def kill_worker(server: Server) -> None:
    """SIGKILL to the process of vLLM's that holds this rank's part of the model."""
    server.status()
    (pid,) = [one.pid for one in server.engine_processes() if one.name.startswith("VLLM::Worker")]
    os.kill(pid, signal.SIGKILL)


def wait_for(server: Server, words: str, timeout_s: float) -> float:
    """Until it has said `words`, the seconds it took."""
    began = time.monotonic()
    while words not in server.log():
        assert time.monotonic() - began < timeout_s, (
            f"not {words!r} after {timeout_s} s\n{server.log()[-4000:]}"
        )
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_killed_worker_of_rank_1_ends_requests_within_5_s_and_is_named_and_the_control_port_answers_all_along(  # noqa: E501
    ranks: Ranks,
) -> None:
    head = ranks.head
    stream = head.stream(900).wait_for(3)
    control = ControlPort(head)
    try:
        kill_worker(ranks.rank1)
        between: list[int | str] = []

        def ask() -> None:
            try:
                body = {"model": "default", "prompt": "word7", "max_tokens": 20}
                between.append(head.ask("/v1/completions", body)[0])
            except OSError as error:
                between.append(type(error).__name__)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        stream.join(HEARD_S)
        assert stream.finish_reason is None
        asking.join(HEARD_S)
        assert between and between != [200]
        seconds = wait_for(head, f"node {RANK_1}: VLLM::Worker", HEARD_S)
        assert (
            "was killed by SIGKILL: the server is down until the cluster is complete again"
            in head.log()
        )
        assert seconds < HEARD_S
        head.wait_until_ready()
    finally:
        control.end()
    assert control.asked > 20
    assert control.refused == 0, control.states
    assert (
        head.ask("/v1/completions", {"model": "default", "prompt": "word7", "max_tokens": 3})[0]
        == 200
    )


def test_rank_0_stopped_while_it_waits_ends_both_ranks_with_0_within_the_drain_time(
    ranks: Ranks,
) -> None:
    ranks.rank1.wait_until_ready()
    before = ranks.head.log().count("the server is down")
    kill_worker(ranks.rank1)
    began = time.monotonic()
    while ranks.head.log().count("the server is down") == before:
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    ranks.head.signal()
    stopped = time.monotonic()
    assert ranks.head.wait(DRAIN_S) == 0
    assert ranks.rank1.wait(DRAIN_S - (time.monotonic() - stopped)) == 0
