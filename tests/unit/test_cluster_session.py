"""The server's side of a cluster: what is missing, what is lost, and what happens then."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nibble.cluster import coordinator
from nibble.cluster import watch as watch_module
from nibble.cluster.across import serve_across
from nibble.cluster.agent import AgentError
from nibble.cluster.coordinator import Cluster
from nibble.cluster.facts import Problem
from nibble.cluster.file_server import Offers
from nibble.cluster.membership import Membership
from nibble.cluster.needs import least_memory_bytes
from nibble.cluster.network import node_address
from nibble.cluster.node import Place
from nibble.cluster.preflight import Caller, Report
from nibble.cluster.roster import Roster
from nibble.cluster.token import withhold_from_ray
from nibble.cluster.watch import NodeLost, Watch
from nibble.errors import ExitCode, NibbleError
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.serve.control import Answers
from nibble.settings.sources import load_settings

HERE = "127.0.0.1"
MP = {
    "NIBBLE_NNODES": "2",
    "HEAD_IP": HERE,
    "TENSOR_PARALLEL_SIZE": "2",
    "NIBBLE_CLUSTER_WAIT_SECONDS": "1",
}
RAY = {"NIBBLE_CLUSTER": "ray", "HEAD_IP": HERE, "TENSOR_PARALLEL_SIZE": "2"}


def plan(environ: dict[str, str]) -> Plan:
    return plan_for(read_wishes(["nibble-demo", "--control-port", "18461"], environ))


def message(rank: int | None, address: str = "10.0.0.2", **more: Any) -> dict[str, Any]:
    known = {
        "address": address,
        "session": "a",
        "role": "serve",
        "rank": rank,
        "time": time.time(),
        "facts": {"vllm": "x"},
    }
    return known | more


def quiet(text: str) -> None:
    """Says nothing."""


def opened(
    environ: dict[str, str],
    folder: Path,
    given: Mapping[str, str] | None = None,
    roster: Roster | None = None,
) -> Cluster:
    """The server's side here; `given` is the user's environment."""
    place, stop = Place(HERE, "lo", given or {}, folder), threading.Event()
    return Cluster(plan(environ), place, "hush", roster, folder, quiet, stop, Offers())


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return opened(MP, tmp_path, roster=Roster("head"))


def roster_of(cluster: Cluster) -> Roster:
    assert cluster._roster is not None
    return cluster._roster


def missing(cluster: Cluster) -> str | None:
    found = cluster.membership.missing()
    return found.what if found else None


def test_missing_ranks_are_named(cluster: Cluster) -> None:
    assert missing(cluster) == "no answer from the nodes with rank 0, 1"
    roster_of(cluster).beat(message(0, HERE))
    assert missing(cluster) == "no answer from the node with rank 1"
    roster_of(cluster).beat(message(1, busy=1))
    assert missing(cluster) == "node 10.0.0.2 (rank 1) still ends its ranks of the last run"
    roster_of(cluster).beat(message(1))
    assert cluster.membership.missing() is None


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "no Ray head answers at 127.0.0.1"),
        ([("10.0.0.2", 4)], "no Ray node runs on this machine"),
        ([(HERE, 1)], "the plan needs 2 GPUs, but the nodes offer 1"),
        ([(HERE, 1), ("10.0.0.2", 1)], None),
        ([(HERE, 0), ("10.0.0.2", 2)], None),
    ],
)
def test_with_ray_gpus_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, int]], words: str | None
) -> None:
    found = opened(RAY, tmp_path)
    listed = [
        {"address": address, "gpus": gpus, "age_s": 0.0, "rank": None} for address, gpus in nodes
    ]
    monkeypatch.setattr(found.membership, "nodes", lambda: listed)
    what = missing(found)
    assert (what is None) if words is None else words in str(what)


def test_a_server_without_a_ray_node_beside_it_is_sent_into_the_heads_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(RAY | {"NIBBLE_CLUSTER_WAIT_SECONDS": "0"}, tmp_path)
    there = {"address": "10.0.0.2", "gpus": 4, "age_s": 0.0, "rank": None}
    said: list[str] = []
    monkeypatch.setattr(found.membership, "nodes", lambda: [there])
    monkeypatch.setattr(found, "say", said.append)
    with pytest.raises(
        NibbleError, match=r"docker exec HEAD /opt/nibble/entrypoint\.sh serve"
    ) as caught:
        found.prepare(None)
    assert caught.value.code == ExitCode.CLUSTER
    assert "start the missing nodes" not in caught.value.line()
    assert len(said) == 1 and "docker exec" in said[0]  # before the time is over


def test_with_ray_a_node_that_was_lost_before_is_not_lost_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head keeps what it said last: that it holds a part of the model."""
    found = opened(RAY, tmp_path)
    gone = {"address": "10.0.0.2", "name": "10.0.0.2", "session": "a", "busy": 1, "age_s": 15.0}
    there = gone | {"address": "10.0.0.3", "name": "10.0.0.3", "age_s": 1.0}
    monkeypatch.setattr(found.membership, "nodes", lambda: [gone, there])
    assert found.current_run.lost() is None
    monkeypatch.setattr(found.membership, "nodes", lambda: [gone, there | {"age_s": 15.0}])
    assert found.current_run.lost() == "node 10.0.0.3 has not answered for 15 s"


def test_nodes_that_stay_away_are_exit_9_and_after_a_loss_exit_10(cluster: Cluster) -> None:
    with pytest.raises(NibbleError, match="rank 0, 1 after 1 s") as caught:
        cluster.prepare(None)
    assert caught.value.code == ExitCode.CLUSTER
    with pytest.raises(
        NibbleError, match="node x is gone, and it did not return within 1 s"
    ) as caught:
        cluster.prepare(NodeLost("node x is gone"))
    assert caught.value.code == ExitCode.ENGINE_DIED


def test_a_node_whose_last_beat_was_without_facts_does_not_stop_the_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second rank's first ones to a head that was killed and started again: the preflight
    has asked meanwhile.
    """
    for rank, address in enumerate((HERE, "10.0.0.2")):
        roster_of(cluster).beat(message(rank, address, facts={}))
    asked = [{"address": address, "facts": {"interface": "eth7"}} for address in (HERE, "10.0.0.2")]
    passed = Report(asked, [], {"gb_per_s": 1.0, "backend": "gloo", "least_gb_per_s": 0.01})
    said: list[str] = []
    monkeypatch.setattr(cluster, "_preflight", lambda nodes: passed)
    monkeypatch.setattr(cluster, "say", said.append)
    assert cluster._check(None, time.monotonic())
    assert "10.0.0.2 (eth7)" in said[0]


def test_a_rank_that_fetches_the_model_from_here_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_s = iter([0.0, 0.5, 0.0, 7.0])
    monkeypatch.setattr(coordinator, "BEAT_S", 0.3)
    monkeypatch.setattr(cluster._offers, "idle_s", lambda: next(idle_s))
    with pytest.raises(NibbleError, match="rank 0, 1 after 1 s"):
        cluster.prepare(None)
    assert list(idle_s) == []


def test_with_ray_a_start_waits_until_rays_head_reaches_every_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM would wait for half an hour for a GPU that the head counts as given away."""
    head = {
        "address": HERE,
        "name": HERE,
        "role": "ray-head",
        "rank": None,
        "gpus": 1,
        "age_s": 0.0,
    }
    nodes = [head, head | {"address": "10.0.0.2", "name": "10.0.0.2", "role": "ray-worker"}]
    environ = {**RAY, "VLLM_CONFIG_ROOT": str(tmp_path / "config")}
    found = opened(RAY, tmp_path, environ)
    whys = iter(["Ray's head does not reach all", None])
    asked: list[tuple[list[str], str]] = []

    def unreached(
        addresses: list[str], environ: dict[str, str], over: threading.Event
    ) -> str | None:
        asked.append((addresses, environ["RAY_ADDRESS"]))
        return next(whys)

    said: list[str] = []
    monkeypatch.setattr(coordinator, "preflight", lambda *a, **b: Report(nodes, [], None))
    monkeypatch.setattr(coordinator, "unreached", unreached)
    monkeypatch.setattr(found.membership, "nodes", lambda: nodes)
    monkeypatch.setattr(found, "say", said.append)
    assert not found._check(NodeLost("node x is gone"), time.monotonic() + 9)
    assert "not yet" in said[0] and "Ray's head does not reach all" in said[0]
    assert found._check(NodeLost("node x is gone"), time.monotonic() + 9)
    assert asked == [([HERE, "10.0.0.2"], f"{HERE}:6379")] * 2


def answers(monkeypatch: pytest.MonkeyPatch, found: Cluster) -> None:
    """Every node but 10.0.0.9 tells its reports."""

    def ask(caller: Caller, address: str, path: str, *more: Any) -> dict[str, Any]:
        if address == "10.0.0.9":
            raise AgentError(0, "timed out")
        return {"reports": [{"at": address}]}

    monkeypatch.setattr(Caller, "ask", ask)


def test_the_other_ranks_are_asked_what_their_workers_proved(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, cluster)
    for rank, address in enumerate((HERE, "10.0.0.2", "10.0.0.9")):
        roster_of(cluster).beat(message(rank, address))
    cluster.current_run.set_members(cluster.membership.nodes())
    assert Watch(cluster).reports() == {
        "10.0.0.2 (rank 1)": [{"at": "10.0.0.2"}],
        "10.0.0.9 (rank 2)": [],
    }


def test_with_ray_the_nodes_that_hold_parts_are_asked_this_machines_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = opened(RAY, tmp_path)
    answers(monkeypatch, found)
    nodes = [
        {"address": address, "name": address, "busy": busy, "age_s": age_s}
        for address, busy, age_s in (
            (HERE, 1, 0.0),
            ("10.0.0.2", 1, 0.0),
            ("10.0.0.3", 0, 0.0),
            ("10.0.0.4", 1, 60.0),
        )
    ]
    monkeypatch.setattr(found.membership, "nodes", lambda: nodes)
    assert found.current_run.reports() == {HERE: [{"at": HERE}], "10.0.0.2": [{"at": "10.0.0.2"}]}


# vllm 0.32 v1/executor/ray_executor_v2.py:522
DEAD_WORKER = "ERROR RayWorkerProc rank=[1] died unexpectedly, shutting down executor."


def watched(cluster: Cluster, line: str | None, seconds: float) -> NibbleError | None:
    """What a watch says within `seconds`."""
    found: list[NibbleError] = []
    over = threading.Event()
    watch = Watch(cluster)
    if line:
        watch.feed(line)

    def fail(error: NibbleError) -> None:
        found.append(error)
        over.set()

    thread = threading.Thread(target=lambda: watch.run(fail, lambda why: None, over))
    thread.start()
    thread.join(seconds)
    over.set()
    thread.join()
    return found[0] if found else None


def test_a_lost_node_is_told_at_once_and_a_dead_worker_when_no_node_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "BEAT_S", 0.05)
    monkeypatch.setattr(watch_module, "LOST_S", 0.3)
    assert watched(cluster, None, 0.5) is None
    died = watched(cluster, DEAD_WORKER, 5)
    assert died is not None and died.code == ExitCode.ENGINE_DIED
    assert "all nodes still answer" in died.line()
    monkeypatch.setattr(cluster.current_run, "lost", lambda: "node 10.0.0.2 has left")
    lost = watched(cluster, None, 5)
    assert lost is not None and lost.what == "node 10.0.0.2 has left"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[NodeLost | None]:
    """Every look for nodes succeeds; with what it was told."""
    told: list[NodeLost | None] = []

    def prepare(self: Cluster, lost: NodeLost | None) -> bool:
        told.append(lost)
        return True

    monkeypatch.setattr(Cluster, "prepare", prepare)
    monkeypatch.setattr(coordinator, "BEAT_S", 0.01)
    monkeypatch.setattr("nibble.cluster.agent.AGENT_PORT", 0)
    return told


def outcome(run: Callable[[int], int], tmp_path: Path) -> int:
    """`serve_across` with a vLLM that does what `run` says for its n-th start."""
    starts = iter(range(100))
    environ = {**MP, "NIBBLE_CLUSTER_TOKEN": "token", "NIBBLE_CACHE_DIR": str(tmp_path)}
    return serve_across(plan(environ), environ, quiet, lambda own, watch, ready: run(next(starts)))


def test_the_service_comes_back_after_a_lost_node(
    attempts: list[NodeLost | None], tmp_path: Path
) -> None:
    def run(start: int) -> int:
        if start == 0:
            raise NodeLost("node 10.0.0.2 has left")
        return 0

    assert outcome(run, tmp_path) == 0
    assert [None if lost is None else lost.what for lost in attempts] == [
        None,
        "node 10.0.0.2 has left",
    ]


def test_a_stop_signal_between_two_runs_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "BEAT_S", 0.01)
    monkeypatch.setattr("nibble.cluster.agent.AGENT_PORT", 0)
    monkeypatch.setattr(Membership, "missing", lambda self: None)
    monkeypatch.setattr(Cluster, "_claim_nodes", lambda self: None)
    monkeypatch.setattr(Cluster, "_check", lambda self, lost, deadline: True)

    def run(start: int) -> int:
        assert start == 0
        raise NodeLost("node 10.0.0.2 has left")

    def say(text: str) -> None:
        if "the server is down" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    environ = {**MP, "NIBBLE_CLUSTER_TOKEN": "token", "NIBBLE_CACHE_DIR": str(tmp_path)}
    starts = iter(range(100))
    before = signal.signal(signal.SIGTERM, lambda *given: pytest.fail("the signal is not handled"))
    try:
        assert (
            serve_across(plan(environ), environ, say, lambda own, watch, ready: run(next(starts)))
            == 0
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def loss_of(cluster: Cluster) -> str | None:
    found = cluster.current_run.loss()
    return None if found is None else f"{type(found).__name__} {found.what}"


def test_a_process_that_ended_on_another_node_is_the_loss_unless_one_ended_here_before(
    cluster: Cluster,
) -> None:
    roster = roster_of(cluster)
    roster.beat(message(1))
    cluster.current_run.set_members(cluster.membership.nodes())
    cluster.begin()
    cluster.ready()
    end = {"run": roster.run, "pid": 0, "why": "VLLM::Worker (pid 7) ended by itself", "ago_s": 1.0}
    cluster.current_run._began_at -= 100
    roster.beat(message(1, ended=[end | {"run": roster.run - 1}]))
    assert cluster.current_run.loss() is None  # of an earlier run
    roster.beat(message(1, ended=[end]))
    assert (
        loss_of(cluster) == "NodeLost node 10.0.0.2 (rank 1): VLLM::Worker (pid 7) ended by itself"
    )
    cluster.current_run.died_here()
    assert cluster.current_run.loss() is not None  # it ended before
    cluster.current_run._died_here_at -= 5
    assert cluster.current_run.loss() is None
    cluster.current_run._died_here_at -= 60  # vLLM went on without that one
    assert cluster.current_run.loss() is not None


def test_a_process_that_ended_before_the_server_was_ready_is_exit_10_and_counts_for_the_crash_loop(
    attempts: list[NodeLost | None], tmp_path: Path
) -> None:
    """Another run would load for minutes and most likely end the same way."""

    def run(own: Mapping[str, str], watch: Watch, ready: Callable[[], None]) -> int:
        roster = roster_of(watch._cluster)
        watch._cluster.current_run._began_at -= 5
        end = {
            "run": roster.run,
            "pid": 0,
            "why": "VLLM::Worker (pid 7) ended by itself",
            "ago_s": 1.0,
        }
        roster.beat(message(1, ended=[end]))
        raise NibbleError(ExitCode.ENGINE_DIED, what="vLLM ended by itself in phase load")

    environ = {**MP, "NIBBLE_CLUSTER_TOKEN": "token", "NIBBLE_CACHE_DIR": str(tmp_path)}
    with pytest.raises(
        NibbleError, match=r"node 10\.0\.0\.2 \(rank 1\): VLLM::Worker .* before the server"
    ) as caught:
        serve_across(plan(environ), environ, quiet, run)
    assert (type(caught.value), caught.value.code, len(attempts)) == (
        NibbleError,
        ExitCode.ENGINE_DIED,
        1,
    )


def test_with_ray_a_process_matters_where_its_worker_told_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(RAY, tmp_path)
    end = {"run": 0, "pid": 7, "why": "rank 1 of the model (pid 7) ended by itself", "ago_s": 1.0}
    there = {
        "address": "10.0.0.3",
        "name": "10.0.0.3",
        "session": "a",
        "busy": 1,
        "age_s": 0.0,
        "ended": [end],
    }
    monkeypatch.setattr(found.membership, "nodes", lambda: [there])
    told = {"reports": [{"rank": 1}], "ranks": {"7": 1}}
    monkeypatch.setattr(Caller, "ask", lambda self, address, path, body, timeout_s=0: told)
    watch = found.begin()
    assert (
        found.current_run.loss() is None
    )  # of another server on the same nodes, for all that is known
    watch.reports()
    found.ready()
    assert found.current_run.loss() is None  # before this run began: of the server before
    found.current_run._began_at -= 5
    assert loss_of(found) == "NodeLost node 10.0.0.3: rank 1 of the model (pid 7) ended by itself"
    watch.feed(DEAD_WORKER)
    assert "rank 1 on 10.0.0.3" in str(watch.dead_worker())


def test_when_rays_head_stops_the_server_drains_and_a_loss_means_nothing_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "BEAT_S", 0.02)
    monkeypatch.setattr(cluster.current_run, "lost", lambda: "node 10.0.0.2 has left")
    cluster.membership.head_stops = True
    drained: list[str] = []
    failed: list[NibbleError] = []
    over = threading.Event()
    thread = threading.Thread(
        target=lambda: Watch(cluster).run(failed.append, drained.append, over)
    )
    thread.start()
    time.sleep(0.3)
    over.set()
    thread.join()
    assert (len(drained), failed) == (1, [])


def test_a_server_that_drained_with_rays_head_waits_for_the_head(
    attempts: list[NodeLost | None], tmp_path: Path
) -> None:
    clusters: list[Cluster] = []

    def run(own: Mapping[str, str], watch: Watch, ready: Callable[[], None]) -> int:
        clusters.append(watch._cluster)
        watch._cluster.membership.head_stops = len(clusters) == 1
        return 0

    environ = {**MP, "NIBBLE_CLUSTER_TOKEN": "token", "NIBBLE_CACHE_DIR": str(tmp_path)}
    assert serve_across(plan(environ), environ, quiet, run) == 0
    assert [lost and lost.what for lost in attempts] == [
        None,
        "the Ray head at 127.0.0.1 stopped",
    ]


def test_only_a_server_that_runs_holds_up_the_heads_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[Mapping[str, Any]] = []

    def ask(
        self: Caller, address: str, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        bodies.append({"path": path, **body})
        return {"nodes": [], "state": "stopping"}

    monkeypatch.setattr(Caller, "ask", ask)
    found = opened(RAY, tmp_path)
    found.membership.nodes()
    found.begin()
    found.membership.nodes()
    found.end(stopped=False)
    assert missing(found) == "the Ray head at 127.0.0.1 is stopping"
    assert [(one["path"], "server" in one) for one in bodies] == [
        ("/nodes", False),
        ("/nodes", True),
        ("/ended", True),
        ("/nodes", False),
    ]
    assert bodies[1]["stops_within_s"] == 60


def test_a_head_that_was_not_asked_for_a_while_is_asked_before_it_counts_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preflight may take longer than a silence that means a loss."""
    there = [{"address": HERE, "gpus": 2, "age_s": 0.0, "rank": None}]
    found = opened(RAY, tmp_path)
    monkeypatch.setattr(Caller, "ask", lambda self, *given: {"nodes": there})
    found.membership._answered_at -= 100
    assert found.membership.missing() is None


def test_what_is_not_yet_right_is_said_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    left = iter(range(900, 1000))

    def short(nodes: object) -> Report:
        return Report(
            [], [Problem("b", f"{next(left)} MiB of memory are available", "stop it")], None
        )

    monkeypatch.setattr(cluster, "say", said.append)
    monkeypatch.setattr(cluster, "_preflight", short)
    for _ in range(20):
        assert not cluster._check(NodeLost("node x is gone"), time.monotonic() + 9)
    assert len(said) == 1 and said[0].startswith("not yet: node b: 900 MiB")
    assert "919 MiB" in cluster.status()["detail"]


def test_the_control_port_answers_without_a_break_over_two_runs_and_between_them(
    attempts: list[NodeLost | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Cluster, "who_was_lost", lambda self: time.sleep(0.3) or NodeLost("node 10.0.0.2 has left")
    )
    port = plan(MP).settings.control_port
    over, refused, states = threading.Event(), [], []

    def ask() -> None:
        while not over.wait(0.005):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                    states.append(json.load(answer)["state"])
            except OSError as error:
                refused.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    starts = iter(range(100))

    def run(own: Mapping[str, str], watch: Watch, ready: Callable[[], None]) -> int:
        start = next(starts)
        control = watch.control(Answers(lambda: {"state": f"run {start}"}, lambda: True))
        control.start()
        if not start:
            asking.start()
        time.sleep(0.2)
        control.close()
        if start == 0:
            raise NibbleError(ExitCode.ENGINE_DIED, what="vLLM ended by itself")
        over.set()
        asking.join()
        return 0

    environ = {**MP, "NIBBLE_CLUSTER_TOKEN": "token", "NIBBLE_CACHE_DIR": str(tmp_path)}
    assert serve_across(plan(environ), environ, quiet, run) == 0
    assert refused == []
    assert list(dict.fromkeys(states)) == ["run 0", "starting", "run 1"]


def test_a_stop_signal_while_it_is_looked_for_a_lost_node_is_exit_0(
    attempts: list[NodeLost | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_meanwhile(self: Cluster) -> None:
        self.stop.set()

    monkeypatch.setattr(Cluster, "who_was_lost", told_meanwhile)
    monkeypatch.setattr(Cluster, "prepare", lambda self, lost: not self.stop.is_set())

    def run(start: int) -> int:
        raise NibbleError(ExitCode.ENGINE_DIED, what="vLLM ended by itself")

    assert outcome(run, tmp_path) == 0


def test_losses_without_end_are_exit_10(attempts: list[NodeLost | None], tmp_path: Path) -> None:
    def run(start: int) -> int:
        raise NodeLost("node 10.0.0.2 has left")

    with pytest.raises(NodeLost) as caught:
        outcome(run, tmp_path)
    assert caught.value.code == ExitCode.ENGINE_DIED
    assert len(attempts) == 6


def test_what_no_lost_node_explains_is_the_error_it_was(
    attempts: list[NodeLost | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "who_was_lost", lambda self: None)

    def run(start: int) -> int:
        raise NibbleError(ExitCode.ENGINE_DIED, what="out of memory")

    with pytest.raises(NibbleError, match="out of memory"):
        outcome(run, tmp_path)
    assert len(attempts) == 1


def test_secrets_stay_out_of_what_ray_copies_and_other_names_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ray_non_carry_over_env_vars.json"
    path.write_text('["OURS"]')
    withhold_from_ray({"VLLM_CONFIG_ROOT": str(tmp_path)})
    names = json.loads(path.read_text())
    assert {
        "OURS",
        "NIBBLE_API_KEY",
        "HF_TOKEN",
        "NIBBLE_GATE_INTERNAL",
        "RAY_AUTH_TOKEN_PATH",
    } <= set(names)


def test_what_is_named_like_a_secret_stays_here_too(tmp_path: Path) -> None:
    own = {"AWS_SECRET_ACCESS_KEY": "k", "WANDB_API_KEY": "k", "PGPASSWORD": "k"}
    others = {
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "9",
        "TOKENIZERS_PARALLELISM": "0",
        "NCCL_DEBUG": "INFO",
    }
    withhold_from_ray({"VLLM_CONFIG_ROOT": str(tmp_path), **own, **others})
    names = set(json.loads((tmp_path / "ray_non_carry_over_env_vars.json").read_text()))
    assert own.keys() <= names
    assert not others.keys() & names


def test_the_folder_of_that_file_is_the_one_vllm_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    withhold_from_ray({"VLLM_CONFIG_ROOT": "~/vllm"})
    assert (tmp_path / "vllm" / "ray_non_carry_over_env_vars.json").is_file()


@pytest.mark.parametrize("text", ["5", "[[]]", "{"])
def test_a_file_that_is_no_list_of_names_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "ray_non_carry_over_env_vars.json").write_text(text)
    with pytest.raises(NibbleError, match="keeps secrets from every other node"):
        withhold_from_ray({"VLLM_CONFIG_ROOT": str(tmp_path)})


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NibbleError, match="keeps secrets from every other node") as caught:
        withhold_from_ray({"VLLM_CONFIG_ROOT": str(tmp_path / "file")})
    assert caught.value.code == ExitCode.CONFIG


def test_the_environment_of_vllm_on_ray_has_the_token_as_a_private_file(tmp_path: Path) -> None:
    environ = {**RAY, "VLLM_CONFIG_ROOT": str(tmp_path / "config")}
    chosen = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    cluster = opened(RAY, tmp_path, {**chosen, **environ})
    found = cluster.environ(environ | {"NCCL_SOCKET_IFNAME": "eth7"})
    assert found["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")
    assert "hush" not in found.values()
    path = Path(found["RAY_AUTH_TOKEN_PATH"])
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("hush", 0o600)


def test_rank_0_has_the_address_that_the_others_use() -> None:
    assert node_address(load_settings({}, MP).settings, None) == HERE


def test_each_node_needs_its_part_of_the_weights_the_engine_and_a_cache() -> None:
    one, two = plan({}), plan(MP)
    assert one.budget.weights_bytes and two.budget.weights_bytes
    assert two.budget.weights_bytes <= one.budget.weights_bytes // 2 + 1
    assert two.budget.overhead_bytes < least_memory_bytes(two)
