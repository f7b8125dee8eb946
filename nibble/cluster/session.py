"""The server's side: wait for the nodes, check them, watch them while vLLM runs, and start again when one comes back."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.cluster.agent import Agent, AgentError
from nibble.cluster.claim import Claim
from nibble.cluster.copies import distribute
from nibble.cluster.facts import Problem
from nibble.cluster.files import Offers
from nibble.cluster.head import head_handlers, running
from nibble.cluster.member import Member
from nibble.cluster.network import is_here
from nibble.cluster.node import Place, find_place, node_handlers
from nibble.cluster.ports import GCS_PORT, rank_0_ports
from nibble.cluster.preflight import Caller, Report, preflight
from nibble.cluster.rank_settings import rank_facts
from nibble.cluster.ray_reach import unreached
from nibble.cluster.roster import BEAT_S, LOST_S, Roster, head_first, lost_node
from nibble.cluster.token import heads_token, members_token, withhold_from_ray
from nibble.control import ControlServer
from nibble.errors import ExitCode, NibbleError
from nibble.processes import stop_signals

if TYPE_CHECKING:
    from nibble.plan import Plan

RESTARTS = (
    5  # after lost nodes; then the exit code says it, and the restart policy and the crash-loop breaker act
)
DEAD_WORKER = "died unexpectedly, shutting down executor"  # vllm 0.32 v1/executor/ray_executor_v2.py:538
Say = Callable[[str], None]


class NodeLost(NibbleError):
    """A node that the model needs is gone."""

    def __init__(self, why: str) -> None:
        super().__init__(ExitCode.ENGINE_DIED, why, "", "see what that node says; it may rejoin at any time")


class Watch:
    """Looks after the nodes while vLLM runs; `launch.Supervisor` calls `run` in a thread and `feed` with every log line."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._worker_died: float | None = None

    def feed(self, line: str) -> None:
        """Ray's executor says when one of its processes ended, and then waits without end (environment.md 3)."""
        if DEAD_WORKER in line and self._worker_died is None:
            self._worker_died = time.monotonic()

    def reports(self) -> dict[str, list[Mapping[str, Any]]]:
        """See `Cluster.reports`."""
        return self._cluster.reports()

    def run(self, fail: Callable[[NibbleError], None], over: threading.Event) -> None:
        """Until `over`: `fail` gets the error when a node is lost, or a worker process without its node."""
        while not over.wait(BEAT_S):
            if why := self._cluster.lost():
                fail(NodeLost(why))
                return
            if self._worker_died is not None and time.monotonic() - self._worker_died > LOST_S:
                fail(NodeLost("a worker process of vLLM's ended on one of the nodes; all nodes still answer"))
                return


class Cluster:
    """The nodes that serve a plan, as the server sees them. Made through `open_cluster`."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        token: str,
        roster: Roster | None,
        folder: Path,
        say: Say,
        stop: threading.Event,
        offers: Offers,
    ) -> None:
        self.plan, self.place, self.say = plan, place, say
        self._token, self._roster, self._folder = token, roster, folder
        self._stop, self._offers = stop, offers
        assert plan.topology.head is not None
        self._caller = Caller(place.address if roster else plan.topology.head, token, place.environ)
        self.claim = Claim(self._caller, f"a server at {place.address} is starting")
        self._members: dict[str, dict[str, Any]] = {}
        self._last: list[dict[str, Any]] = []
        self._left: Mapping[str, str] = {}
        self._answered = time.monotonic()
        self._state: dict[str, Any] = {
            "state": "starting",
            "phase": "cluster",
            "progress": None,
            "detail": "",
        }
        self.report: Report | None = None

    # --- who is there ---

    def nodes(self) -> list[dict[str, Any]]:
        """The head's list, or the last one where the head of a Ray cluster does not answer."""
        if self._roster:
            self._left = self._roster.left
            return self._roster.nodes()
        try:
            found = self._caller.ask(self._caller.head, "/nodes", {}, 3.0)
            self._last, self._left, self._answered = found["nodes"], found.get("left", {}), time.monotonic()
        except AgentError as error:
            if error.status == 401:
                what = f"the head at {self._caller.head} refused this node's token"
                raise NibbleError(
                    ExitCode.CLUSTER, what, "the head's token", "set RAY_AUTH_TOKEN_FILE"
                ) from None
        return self._last

    def missing(self) -> str | None:
        """What is not there yet, in words."""
        topology = self.plan.topology
        alive = [node for node in self.nodes() if node["age_s"] < LOST_S and self._head_silence_s < LOST_S]
        if topology.nodes is not None:
            ranks = {node["rank"] for node in alive}
            absent = [str(rank) for rank in range(topology.nodes) if rank not in ranks]
            if absent:
                return f"no sign of the node{'s' if absent[1:] else ''} with rank {', '.join(absent)}"
            # A rank that ends its part of vLLM ends every child with it, the preflight's all-reduce too.
            busy = [node["name"] for node in alive if node["busy"]]
            return f"node {busy[0]} still ends its part of the last run" if busy else None
        if not alive:
            return f"no Ray head answers at {self._caller.head}"
        if not any(node["address"] == self.place.address for node in alive):
            return f"no Ray node runs on this machine ({self.place.address})"
        gpus = sum(node["gpus"] for node in alive)
        if gpus < topology.ranks:
            there = ", ".join(f"{node['address']} with {node['gpus']}" for node in alive)
            return f"{topology.ranks} GPUs are needed and the nodes offer {gpus} ({there})"
        return None

    def _taken(self) -> str | None:
        """Who else has the nodes, in words; None once this server has them."""
        try:
            self.claim.take()
        except AgentError as error:
            return str(error) if error.status else f"no head answers at {self._caller.head} ({error})"
        return None

    def lost(self) -> str | None:
        """Which node of the running server is gone, in words."""
        now = self.nodes()
        if self._head_silence_s >= LOST_S:
            return (
                f"the head at {self._caller.head} has given no sign of life for {self._head_silence_s:.0f} s"
            )
        if self._roster is None:  # Ray chose the nodes: those that hold parts of it, but none lost before
            self._members |= {
                node["address"]: node
                for node in now
                if node["busy"] and node["age_s"] < LOST_S and node["address"] not in self._members
            }
        return lost_node(list(self._members.values()), now, self._left)

    def who_was_lost(self) -> str | None:
        """After vLLM ended by itself: was it a node? A lost node is known only once it was silent for LOST_S."""
        deadline = time.monotonic() + LOST_S + 3 * BEAT_S
        while time.monotonic() < deadline and not self._stop.is_set():
            if why := self.lost():
                return why
            self._stop.wait(BEAT_S)
        return None

    @property
    def _head_silence_s(self) -> float:
        return 0.0 if self._roster else time.monotonic() - self._answered

    # --- before vLLM ---

    def prepare(self, lost: NodeLost | None) -> bool:
        """Wait for the nodes and check them; False when told to stop.

        Raises CLUSTER where they do not come in time or do not fit together, after a loss ENGINE_DIED where they stay away.
        """
        self._set(starting=False)
        control = ControlServer(self.plan.settings.control_port, lambda: dict(self._state), lambda: False)
        control.start()
        try:
            deadline = time.monotonic() + self.plan.settings.cluster_wait_seconds
            while self._wait(lost, deadline):
                if self._check(lost, deadline):
                    return not self._stop.is_set()
                self.claim.release()
                self._stop.wait(BEAT_S)
            return False
        finally:
            control.close()

    def _wait(self, lost: NodeLost | None, deadline: float) -> bool:
        """Until all are there and nobody else has them. A rank that fetches the model from this one gives no other sign
        of life.
        """
        limit_s = self.plan.settings.cluster_wait_seconds
        said = ""
        while not self._stop.is_set():
            why = self.missing() or self._taken()
            if why is None:
                return True
            if why != said:
                self.say(f"waiting for the cluster: {why}")
                said = self._state["detail"] = why
            if time.monotonic() >= deadline and self._offers.idle_s() >= limit_s:
                if lost is not None:
                    raise NibbleError(
                        ExitCode.ENGINE_DIED, f"{lost.what}, and not back after {limit_s} s: {why}"
                    )
                action = "start the missing nodes, or raise NIBBLE_CLUSTER_WAIT_SECONDS"
                raise NibbleError(ExitCode.CLUSTER, f"{why} after {limit_s} s", "", action)
            self._stop.wait(BEAT_S)
        return False

    def _check(self, lost: NodeLost | None, deadline: float) -> bool:
        """The preflight; False where it fails with a node that has just come back, which is not always whole yet."""
        topology = self.plan.topology
        alive = [node for node in self.nodes() if node["age_s"] < LOST_S]
        nodes = head_first(alive)
        if topology.nodes is None:
            nodes = [node for node in nodes if node["gpus"]]
        self._state["detail"] = f"preflight of {len(nodes)} nodes"
        self.report = self._preflight(nodes)
        try:
            self.report.demand()
        except NibbleError as error:
            if lost is None:
                raise
            if time.monotonic() >= deadline:
                raise NibbleError(
                    ExitCode.ENGINE_DIED, f"{lost.what}, and since then: {error.what}"
                ) from None
            self.say(f"not yet: {error.line()}")
            return False
        found = self.report.reduce
        if found:
            names = ", ".join(
                f"{node['address']} ({node['facts']['interface']})" for node in self.report.nodes
            )
            self.say(
                f"preflight: {len(nodes)} nodes fit together: {names}; all-reduce {found['gb_per_s']} GB/s with "
                f"{found['backend']} (at least {found['least_gb_per_s']})"
            )
        self._members = {node["address"]: node for node in nodes if topology.nodes is not None}
        return True

    def _preflight(self, nodes: Sequence[Mapping[str, Any]]) -> Report:
        """The checks; with Ray also the folders that the driver names, from which every node loads, and Ray's own ways."""
        settings, has_ray = self.plan.settings, self.plan.topology.mode == "ray"
        folders = model_folders(self.plan) if has_ray else []
        if settings.cluster_model == "head":
            problems = distribute(self._caller, nodes, self.place.address, folders, self._stop, self._tell)
            if problems or self._stop.is_set():
                return Report(nodes, problems, None)
        report = preflight(
            self._caller,
            nodes,
            has_ray=has_ray,
            models=folders,
            ports=rank_0_ports({flag: choice.value for flag, choice in self.plan.args.items()}),
            least_gb_per_s=settings.cluster_min_gb_per_s,
            least_memory_bytes=least_memory_bytes(self.plan),
            server=rank_facts(self.plan, self.plan.vllm_environ(self.place.environ)) if has_ray else None,
            over=self._stop,
        )
        if not has_ray or report.problems or self._stop.is_set():
            return report
        why = unreached([node["address"] for node in nodes], self.environ(self.place.environ), self._stop)
        action = "see `nibble cluster status`, and start the Ray node anew that was away"
        return replace(report, problems=[Problem(self._caller.head, why, action)] if why else [])

    def _tell(self, text: str) -> None:
        self._state["detail"] = text
        self.say(text)

    # --- while vLLM runs ---

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment for vLLM: `base`, this node's network and, with Ray, the cluster's address and token."""
        found = {**base, **{name: value for name, value in self.place.environ.items() if name not in base}}
        if self.plan.topology.mode != "ray":
            return found
        path = self._folder / "token"
        path.touch(mode=0o600)
        path.write_text(self._token)
        withhold_from_ray(found)
        return found | {
            "RAY_ADDRESS": f"{self._caller.head}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(path),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def begin(self) -> Watch:
        """A new run: headless ranks start theirs."""
        self._set(starting=True)
        return Watch(self)

    def reports(self) -> dict[str, list[Mapping[str, Any]]]:
        """What workers outside of this process's family proved, by the node's name; nothing of a node that does not answer.

        With Ray no worker is in it: those on this machine are the Ray node's.
        """
        if self._roster:
            nodes = [node for address, node in self._members.items() if address != self.place.address]
        else:
            nodes = [node for node in self.nodes() if node["busy"] and node["age_s"] < LOST_S]
        found: dict[str, list[Mapping[str, Any]]] = {}
        for node in nodes:
            try:
                found[node["name"]] = self._caller.ask(node["address"], "/proof", {})["reports"]
            except AgentError:
                found[node["name"]] = []
        return found

    def ready(self) -> None:
        """The server answers: headless ranks are ready too."""
        if self._roster:
            self._roster.state = "ready"
        self.claim.release()

    def end(self, stopped: bool) -> None:
        """The run is over; headless ranks end theirs, for good where the server was `stopped`."""
        self.claim.release()
        if self._roster:
            self._roster.state = "stopped" if stopped else "waiting"
            if stopped:
                time.sleep(2 * BEAT_S)  # until every rank has heard it

    def _set(self, starting: bool) -> None:
        if self._roster:
            self._roster.run += starting
            self._roster.state = "starting" if starting else "waiting"


def model_folders(plan: Plan) -> list[str]:
    """The folders that every node of a Ray cluster loads from: the model's and its draft's."""
    draft = plan.args.get("--speculative-config")
    named = draft.value.get("model") if draft and isinstance(draft.value, Mapping) else None
    return list(dict.fromkeys([plan.model, *([named] if named and Path(named).is_dir() else [])]))


def least_memory_bytes(plan: Plan) -> int:
    """What each node needs: weights, engine and the smallest KV cache; 0 where the weights are not known."""
    budget = plan.budget
    if budget.weights_bytes is None:
        return 0
    return budget.weights_bytes + budget.overhead_bytes + budget.least_kv_bytes


@contextlib.contextmanager
def open_cluster(
    plan: Plan, environ: Mapping[str, str], say: Say, stop: threading.Event
) -> Iterator[Cluster]:
    """The cluster of `plan`; without Ray this process is its head. `stop` ends whatever it waits for."""
    settings, topology = plan.settings, plan.topology
    with tempfile.TemporaryDirectory(prefix="nibble-cluster-") as folder:
        if topology.mode == "ray":
            token = members_token(settings, environ, "serving through Ray")
            place = find_place(settings, environ, topology.head)
            yield Cluster(plan, place, token, None, Path(folder), say, stop, Offers())
            return
        if not is_here(str(topology.head)):
            what = f"HEAD_IP {topology.head} is no address of this machine, and its rank is 0"
            raise NibbleError(ExitCode.CLUSTER, what, "rank 0 on the head", "set NIBBLE_NODE_RANK or HEAD_IP")
        token, where = heads_token(settings, environ)
        place = find_place(settings, environ, None)
        roster = Roster(secrets.token_hex(8))
        offers = Offers()
        if Path(plan.model).is_dir():
            offers.add(Path(plan.model))
        handlers = head_handlers(roster) | node_handlers(place, plan) | offers.handlers()
        agent = Agent(place.address, token, handlers, offers.senders(), environ)
        gpus = len(plan.hardware.gpus)
        member = Member(place.address, token, place.address, "serve", 0, gpus, environ, place.facts)
        say(f"head of {topology.nodes} nodes at {place.address} ({place.interface}); token: {where}")
        with running(agent), running(member):
            member.beat()
            yield Cluster(plan, place, token, roster, Path(folder), say, stop, offers)


def serve_across(
    plan: Plan,
    environ: Mapping[str, str],
    say: Say,
    run: Callable[[Mapping[str, str], Watch, Callable[[], None]], int],
) -> int:
    """Serve on several machines; the exit code of the whole. `run` starts vLLM: (environment, watch, on ready) -> exit code.

    A lost node ends the run; with the node back there is a new one, up to RESTARTS times. A stop signal between two runs ends
    the waiting: process 1 of a container would never see one that nobody handles.
    """
    stop = threading.Event()
    with (
        stop_signals(lambda signum: stop.set()),
        open_cluster(plan, environ, say, stop) as cluster,
        cluster.claim,
    ):
        lost: NodeLost | None = None
        for _ in range(RESTARTS + 1):
            if not cluster.prepare(lost):
                cluster.end(stopped=True)
                return ExitCode.OK
            code: int | None = None
            try:
                code = run(cluster.environ(environ), cluster.begin(), cluster.ready)
                return code
            except NodeLost as error:
                lost = error
            except NibbleError as error:
                why = cluster.who_was_lost() if error.code == ExitCode.ENGINE_DIED else None
                if why is None:
                    raise
                lost = NodeLost(why)
            finally:
                cluster.end(stopped=code is not None)
            say(f"{lost.what}: the server is down until the cluster is complete again")
        assert lost is not None
        raise lost
