"""The server's side of a cluster: waits for nodes, checks and watches them, and restarts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.cluster.agent import AgentError
from nibble.cluster.complete import (
    INTO_THE_HEAD,
    SEE_NODE,
    START_NODES,
    Missing,
    Reminder,
    living,
    missing_gpus,
    missing_ranks,
)
from nibble.cluster.facts import Problem
from nibble.cluster.file_server import Offers
from nibble.cluster.head import running
from nibble.cluster.lock import Claim
from nibble.cluster.model_copies import distribute
from nibble.cluster.needs import least_memory_bytes, model_folders
from nibble.cluster.node import Place
from nibble.cluster.preflight import Caller, Report, preflight
from nibble.cluster.rank_settings import rank_facts
from nibble.cluster.ray_reach import unreached
from nibble.cluster.roster import (
    BEAT_S,
    LOST_S,
    STOPPING,
    Roster,
    ended_process,
    head_first,
    lost_node,
)
from nibble.cluster.token import withhold_from_ray
from nibble.cluster.watch import NodeLost, Watch
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import values_of
from nibble.plan.cluster_ports import GCS_PORT, rank_0_ports
from nibble.serve.control import ControlServer

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

STOP_S = 30.0  # beside the drain: for the end of vLLM's processes
LOOK_S = 0.1
HEAR_S = 4.0  # a heartbeat and its timeout: a rank that has not heard by then is absent
SAME_MOMENT_S = (
    0.5  # within which it cannot be told which of two processes on two machines ended first
)
FOLLOWS_S = 20.0  # vLLM has ended by then, or goes on without the process (launch.ENGINE_END_S)
Say = Callable[[str], None]


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
        self.stop, self._offers = stop, offers
        assert plan.topology.head is not None
        self._caller = Caller(place.address if roster else plan.topology.head, token, place.environ)
        self.claim = Claim(self._caller, f"a server at {place.address} is starting")
        self._members: dict[str, dict[str, Any]] = {}
        self._last: list[dict[str, Any]] = []
        self._left: Mapping[str, str] = {}
        self._answered = time.monotonic()
        self.head_stops = self._runs = False
        self._ranks: dict[
            tuple[str, int], int
        ] = {}  # with Ray: (node's address, pid) -> rank of the model
        self._began_at, self._died_here_at = 0.0, float("inf")
        self._was_ready = False
        self._seen: Sequence[dict[str, Any]] = ()
        self._reminder = Reminder()  # for the waits of `prepare`
        self._state: dict[str, Any] = {
            "state": "starting",
            "phase": "cluster",
            "progress": None,
            "detail": "",
        }
        self.report: Report | None = None
        self.control: ControlServer

    @property
    def head(self) -> str:
        """Its address."""
        return self._caller.head

    def status(self) -> dict[str, Any]:
        """What /status answers while no vLLM runs."""
        return dict(self._state)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """The control port, open from before the first run until after the last."""
        self.control = ControlServer(self.plan.settings.control_port, self.status, lambda: False)
        with running(self.control):
            yield

    # --- who is there ---

    def nodes(self) -> list[dict[str, Any]]:
        """The head's list, or the last one where the head of a Ray cluster does not answer."""
        if self._roster:
            self._left = self._roster.left
            return self._roster.nodes()
        serves = {
            "server": self.claim.who,
            "stops_within_s": self.plan.settings.drain_seconds + STOP_S,
        }
        try:
            found = self._caller.ask(self.head, "/nodes", serves if self._runs else {}, 3.0)
            self._last, self._left, self._answered = (
                found["nodes"],
                found.get("left", {}),
                time.monotonic(),
            )
            self.head_stops = found.get("state") == STOPPING
        except AgentError as error:
            if error.status == 401:
                what = f"the head at {self._caller.head} refused this node's token"
                raise NibbleError(
                    ExitCode.CLUSTER,
                    what=what,
                    expected="the head's token",
                    action="set RAY_AUTH_TOKEN_FILE",
                ) from None
        return self._last

    def missing(self) -> Missing | None:
        """What is not there yet."""
        topology = self.plan.topology
        nodes = self.nodes()  # first: the answer is what ends a silence
        alive = living(nodes) if self._head_silence_s < LOST_S else []
        if topology.nodes is not None:
            return missing_ranks(alive, topology.nodes)
        if self.head_stops:
            return Missing(f"the Ray head at {self.head} is stopping", "start it again")
        if not alive:
            return Missing(
                f"no Ray head answers at {self._caller.head}",
                "start `ray-head` there, or correct HEAD_IP",
            )
        if not any(node["address"] == self.place.address for node in alive):
            return Missing(
                f"no Ray node runs on this machine ({self.place.address})", INTO_THE_HEAD
            )
        return missing_gpus(alive, topology.ranks)

    def _taken(self) -> Missing | None:
        """Who else has the nodes; None once this server has them."""
        try:
            self.claim.take()
        except AgentError as error:
            what = (
                str(error) if error.status else f"no head answers at {self._caller.head} ({error})"
            )
            return Missing(what, "wait until it ends, or stop it" if error.status else START_NODES)
        return None

    def lost(self) -> str | None:
        """Which node of the running server is gone, in words."""
        now = self._seen = self.nodes()
        if self._head_silence_s >= LOST_S:
            return (
                f"the head at {self._caller.head} has not answered for {self._head_silence_s:.0f} s"
            )
        if (
            self._roster is None
        ):  # Ray chose the nodes: those that hold parts of it, but none lost before
            self._members |= {
                node["address"]: node
                for node in now
                if node["busy"] and node["age_s"] < LOST_S and node["address"] not in self._members
            }
        return lost_node(list(self._members.values()), now, self._left)

    def loss(self) -> NibbleError | None:
        """What ends this run: NodeLost, after which there is another run, or a process that ended
        before the server was ready, which another run would most likely see again.
        """
        if why := self.lost():
            return NodeLost(why)
        if why := ended_process(living(self._seen), self._matters):
            what = f"{why}, before the server was ready"
            return (
                NodeLost(why)
                if self._was_ready
                else NibbleError(ExitCode.ENGINE_DIED, what=what, action=SEE_NODE)
            )
        return None

    def _matters(self, node: Mapping[str, Any], end: Mapping[str, Any]) -> bool:
        """Whether the end of a process on another node concerns this run and is not its
        consequence.
        """
        at = time.monotonic() - end["ago_s"]
        if at < self._began_at or SAME_MOMENT_S < at - self._died_here_at < FOLLOWS_S:
            return False
        if self._roster:
            return end["run"] == self._roster.run
        return (node["address"], end["pid"]) in self._ranks

    def died_here(self) -> None:
        """A process of vLLM's ended on this machine."""
        self._died_here_at = time.monotonic()

    def node_of_rank(self, rank: int) -> str | None:
        """With Ray, once the workers have told what they run: the address of the node that has
        `rank`.
        """
        return next((address for (address, _), one in self._ranks.items() if one == rank), None)

    def explain(self, error: NibbleError, watch: Watch) -> NodeLost:
        """The loss behind vLLM's own end. Raises `error` where there is none."""
        if error.code != ExitCode.ENGINE_DIED or self.stop.is_set():
            raise error
        self._set(starting=False)
        self._state["detail"] = f"{error.what}; checking whether a node is lost"
        found = self.who_was_lost()
        if isinstance(found, NodeLost):
            return found
        if self._was_ready and (why := watch.dead_worker()):
            return NodeLost(why)
        if (
            self.stop.is_set()
        ):  # told to stop meanwhile: there is no other run that `error` could hold up
            return NodeLost(error.what)
        raise found or error

    def who_was_lost(self) -> NibbleError | None:
        """After vLLM ended by itself: the lost node, if any. A node counts as lost after LOST_S of
        silence.
        """
        deadline = time.monotonic() + LOST_S + 3 * BEAT_S
        while time.monotonic() < deadline and not self.stop.is_set():
            if loss := self.loss():
                return loss
            self.stop.wait(BEAT_S)
        return None

    @property
    def _head_silence_s(self) -> float:
        return 0.0 if self._roster else time.monotonic() - self._answered

    # --- before vLLM ---

    def prepare(self, lost: NodeLost | None) -> bool:
        """Wait for the nodes and check them; False when told to stop.

        Raises CLUSTER where they do not come in time or do not fit together, after a loss
        ENGINE_DIED where they stay away.
        """
        self._set(starting=False)
        self._reminder = Reminder()
        deadline = time.monotonic() + self.plan.settings.cluster_wait_seconds
        while self._wait(lost, deadline):
            if self._check(lost, deadline):
                return not self.stop.is_set()
            self.claim.release()
            self.stop.wait(BEAT_S)
        return False

    def _wait(self, lost: NodeLost | None, deadline: float) -> bool:
        """Wait until all nodes are present and free. A rank that fetches the model here counts as
        alive.
        """
        limit_s = self.plan.settings.cluster_wait_seconds
        while not self.stop.is_set():
            missing = self.missing() or self._taken()
            if missing is None:
                return True
            why = self._state["detail"] = missing.what
            hint = f"; {missing.action}" if missing.action == INTO_THE_HEAD else ""
            self._remind(f"waiting for the cluster: {why}{hint}")
            if time.monotonic() >= deadline and self._offers.idle_s() >= limit_s:
                if lost is not None:
                    raise NibbleError(
                        ExitCode.ENGINE_DIED,
                        what=f"{lost.what}, and it did not return within {limit_s} s: {why}",
                    )
                raise NibbleError(
                    ExitCode.CLUSTER, what=f"{why} after {limit_s} s", action=missing.action
                )
            self.stop.wait(BEAT_S)
        return False

    def _remind(self, text: str) -> None:
        if self._reminder.is_due(text, time.monotonic()):
            self.say(text)

    def _check(self, lost: NodeLost | None, deadline: float) -> bool:
        """The preflight; False where it fails with a node that has just come back, which is not
        always whole yet.
        """
        topology = self.plan.topology
        nodes = head_first(living(self.nodes()))
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
                    ExitCode.ENGINE_DIED, what=f"{lost.what}, then: {error.what}"
                ) from None
            self._state["detail"] = f"not yet: {error.line()}"
            self._remind(f"not yet: {error.line()}")
            return False
        found = self.report.reduce
        if found:
            names = ", ".join(
                f"{node['address']} ({node['facts']['interface']})" for node in self.report.nodes
            )
            self.say(
                f"preflight: {len(nodes)} nodes are compatible: {names}; all-reduce"
                f" {found['gb_per_s']} GB/s with {found['backend']} (at least"
                f" {found['least_gb_per_s']})"
            )
        self._members = {node["address"]: node for node in nodes if topology.nodes is not None}
        return True

    def _preflight(self, nodes: Sequence[Mapping[str, Any]]) -> Report:
        """The checks; with Ray also the folders that the driver names, from which every node
        loads, and Ray's own ways.
        """
        settings, has_ray = self.plan.settings, self.plan.topology.mode == "ray"
        folders = model_folders(self.plan) if has_ray else []
        if settings.cluster_model == "head":
            problems = distribute(
                self._caller, nodes, self.place.address, folders, self.stop, self._tell
            )
            if problems or self.stop.is_set():
                return Report(nodes, problems, None)
        report = preflight(
            self._caller,
            nodes,
            has_ray=has_ray,
            models=folders,
            ports=rank_0_ports(values_of(self.plan.args)),
            least_gb_per_s=settings.cluster_min_gb_per_s,
            least_memory_bytes=least_memory_bytes(self.plan),
            server=(
                rank_facts(self.plan, self.plan.vllm_environ(self.place.environ))
                if has_ray
                else None
            ),
            over=self.stop,
        )
        if not has_ray or report.problems or self.stop.is_set():
            return report
        why = unreached(
            [node["address"] for node in nodes], self.environ(self.place.environ), self.stop
        )
        action = "see `nibble cluster status`, and restart the Ray node that was away"
        return replace(report, problems=[Problem(self._caller.head, why, action)] if why else [])

    def _tell(self, text: str) -> None:
        self._state["detail"] = text
        self.say(text)

    # --- while vLLM runs ---

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment for vLLM: `base`, this node's network and, with Ray, the cluster's
        address and token.
        """
        found = {
            **base,
            **{name: value for name, value in self.place.environ.items() if name not in base},
        }
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
        self._runs, self._was_ready, self._began_at = True, False, time.monotonic()
        self._died_here_at, self._ranks = float("inf"), {}
        return Watch(self)

    def reports(self) -> dict[str, list[Mapping[str, Any]]]:
        """What workers outside of this process's family proved, by the node's name; nothing of a
        node that does not answer.

        With Ray no worker is in it: those on this machine are the Ray node's.
        """
        if self._roster:
            nodes = [
                node for address, node in self._members.items() if address != self.place.address
            ]
        else:
            nodes = [node for node in self.nodes() if node["busy"] and node["age_s"] < LOST_S]
        found: dict[str, list[Mapping[str, Any]]] = {}
        for node in nodes:
            try:
                told = self._caller.ask(node["address"], "/proof", {})
                found[node["name"]] = told["reports"]
                ranks = told.get("ranks") or {}
                self._ranks |= {(node["address"], int(pid)): rank for pid, rank in ranks.items()}
            except AgentError:
                found[node["name"]] = []
        return found

    def ready(self) -> None:
        """The server answers: headless ranks are ready too."""
        self._was_ready = True
        if self._roster:
            self._roster.state = "ready"
        self.claim.release()

    def end(self, stopped: bool) -> None:
        """The run is over; headless ranks end theirs, for good where the server was `stopped`."""
        self.claim.release()
        self._runs = False
        if self._roster is None:
            with contextlib.suppress(AgentError):
                self._caller.ask(self.head, "/ended", {"server": self.claim.who}, 1.0)
        else:
            self._roster.state = "stopped" if stopped else "waiting"
            if stopped:
                self._until_every_rank_has_heard()

    def _until_every_rank_has_heard(self) -> None:
        """Each hears the state with its next heartbeat; a silent one is skipped."""
        assert self._roster is not None
        told = time.monotonic()
        while time.monotonic() - told < HEAR_S:
            others = [node for node in living(self._roster.nodes()) if node["rank"]]
            if all(node["seen"] > told for node in others):
                break
            time.sleep(LOOK_S)
        time.sleep(LOOK_S)  # for the reply to the last beat

    def _set(self, starting: bool) -> None:
        self._state["detail"] = ""
        if self._roster:
            self._roster.run += starting
            self._roster.state = "starting" if starting else "waiting"
