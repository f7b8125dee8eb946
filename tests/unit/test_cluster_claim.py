"""A server that starts and `nibble cluster check` take turns: both use the same ports, network
and GPUs of the nodes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nibble.cli import cluster_head as commands
from nibble.cluster import agent as agent_module
from nibble.cluster import coordinator
from nibble.cluster import lock as lock_module
from nibble.cluster.agent import Agent
from nibble.cluster.coordinator import Cluster
from nibble.cluster.file_server import Offers
from nibble.cluster.head import head_handlers
from nibble.cluster.lock import Claim
from nibble.cluster.node import LatestProcess, Place
from nibble.cluster.preflight import Caller, Report
from nibble.cluster.roster import LOST_S, Refused, Roster
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from tests.support.servers.serving import free_port

HERE, TOKEN = "127.0.0.1", "0123456789abcdef"
HEAD = {"HEAD_IP": HERE, "NIBBLE_CLUSTER_TOKEN": TOKEN}
RANK_0 = HEAD | {
    "NIBBLE_NNODES": "2",
    "TENSOR_PARALLEL_SIZE": "2",
    "NIBBLE_CLUSTER_WAIT_SECONDS": "9",
}


@pytest.fixture
def roster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Roster]:
    """That of a head whose agent answers on a free port."""
    monkeypatch.setattr(agent_module, "AGENT_PORT", free_port(HERE))
    for module in (lock_module, coordinator):
        monkeypatch.setattr(module, "BEAT_S", 0.05)
    roster = Roster("head")
    agent = Agent(HERE, TOKEN, head_handlers(roster)).start()
    yield roster
    agent.close()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What checks really looked at."""
    looked: list[str] = []

    def preflight(caller: Caller, nodes: list[Mapping[str, Any]], **more: Any) -> Report:
        looked.append("preflight")
        return Report(nodes, [], None)

    monkeypatch.setattr(commands, "preflight", preflight)
    return looked


def join(roster: Roster, **more: Any) -> None:
    message = {"address": HERE, "session": "a", "role": "serve", "rank": 0, "time": time.time()}
    roster.beat(message | {"facts": {"vllm": "x"}} | more)


def check(**more: str) -> Report:
    return commands.cluster_check(read_wishes(["--nnodes", "1"], HEAD | more), lambda text: None)


def test_a_start_waits_for_a_check_and_has_the_nodes_until_it_is_ready(
    roster: Roster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    plan = plan_for(read_wishes(["nibble-demo", "--control-port", "18463"], RANK_0))
    place, stop = Place(HERE, "lo", {}, tmp_path), threading.Event()
    server = Cluster(plan, place, TOKEN, roster, tmp_path, said.append, stop, Offers())
    monkeypatch.setattr(server.membership, "missing", lambda: None)
    monkeypatch.setattr(server, "_check", lambda lost, deadline: said.append("preflight") or True)
    roster.claim("check", "`nibble cluster check` runs on b")
    threading.Timer(0.3, lambda: roster.release("check")).start()
    with server.claim:
        assert server.prepare(None)
        assert said == ["waiting for the cluster: `nibble cluster check` runs on b", "preflight"]
        with pytest.raises(Refused, match=r"a server at 127\.0\.0\.1 is starting"):
            roster.claim("check", "")
        server.ready()
        roster.claim("check", "")


@pytest.mark.parametrize("how", ["starting", "serving"])
def test_a_check_leaves_a_server_alone_and_says_so(
    roster: Roster, checked: list[str], how: str
) -> None:
    join(roster, busy=int(how == "serving"))
    words = "the cluster serves a model"
    if how == "starting":
        words = "a server at 10.0.0.1 is starting"
        roster.claim("server", words)
    with pytest.raises(NibbleError, match=f"{words}: nothing was checked") as caught:
        check()
    assert (caught.value.code, checked) == (ExitCode.CLUSTER, [])


def test_a_check_has_the_nodes_while_it_runs_and_no_longer(
    roster: Roster, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    join(roster)
    own = commands.preflight

    def look(*given: Any, **more: Any) -> Report:
        with pytest.raises(NibbleError, match="`nibble cluster check` runs on "):
            check()
        return own(*given, **more)

    monkeypatch.setattr(commands, "preflight", look)
    check()
    assert checked == ["preflight"]
    roster.claim("server", "")


@pytest.mark.parametrize(
    ("reply", "more", "words"),
    [
        (
            '{"error": "unknown path"}',
            {},
            "the node at 127.0.0.1 is not a head; .* correct HEAD_IP",
        ),
        ("<html>", {}, "the server there is not a nibble node"),
        (None, {"NIBBLE_CLUSTER_TOKEN": "wrong"}, "the head at 127.0.0.1 refused this token"),
    ],
)
def test_what_is_not_the_head_is_told_from_a_head_that_is_silent(
    roster: Roster,
    monkeypatch: pytest.MonkeyPatch,
    reply: str | None,
    more: Mapping[str, str],
    words: str,
) -> None:
    if reply is not None:

        def answer(handler: Any) -> None:
            handler.send_response(404)
            handler.end_headers()
            handler.wfile.write(reply.encode())

        monkeypatch.setattr(agent_module._Handler, "do_POST", answer)
    for ask in (check, lambda **more: commands.cluster_nodes(read_wishes([], HEAD | more))):
        with pytest.raises(NibbleError, match=words) as caught:
            ask(**more)
        assert caught.value.code == ExitCode.CLUSTER


def test_a_claim_is_kept_by_asking_again_and_nobody_keeps_it_who_is_gone(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(roster, "_clock", lambda: now[0])
    claim = Claim(Caller(HERE, TOKEN, {}), "a server at 10.0.0.1 is starting")
    claim.take()
    for _ in range(3):
        now[0] += LOST_S / 2
        time.sleep(0.3)
        with pytest.raises(Refused):
            roster.claim("other", "")
    claim._over.set()  # as one that was killed
    time.sleep(0.1)
    now[0] += LOST_S
    roster.claim("other", "")


def test_a_second_all_reduce_ends_the_first_which_has_the_same_port() -> None:
    """Of a check that was interrupted, for example: its ranks wait for a minute."""
    rank = LatestProcess()
    first = rank.start(["sleep", "60"], os.environ)
    second = rank.start(["sleep", "0.2"], os.environ)
    assert first.wait(5) == -9
    assert second.wait(5) == 0
