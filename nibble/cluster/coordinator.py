"""The server's side of a cluster: it waits for the nodes, checks them and leads a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.cluster.agent import AgentError
from nibble.cluster.caller import Caller
from nibble.cluster.complete import INTO_THE_HEAD, START_NODES, Missing, Reminder, living
from nibble.cluster.current_run import CurrentRun
from nibble.cluster.facts import Problem
from nibble.cluster.file_server import Offers
from nibble.cluster.head import running
from nibble.cluster.lock import Claim
from nibble.cluster.membership import Membership
from nibble.cluster.model_copies import distribute
from nibble.cluster.needs import least_memory_bytes, model_folders
from nibble.cluster.node import Place
from nibble.cluster.preflight import Report, preflight
from nibble.cluster.rank_settings import rank_facts
from nibble.cluster.ray_reach import unreached
from nibble.cluster.roster import BEAT_S, LOST_S, Roster, head_first
from nibble.cluster.token import withhold_from_ray
from nibble.cluster.watch import NodeLost, Watch
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import values_of
from nibble.plan.cluster_ports import GCS_PORT, rank_0_ports
from nibble.serve.control import ControlServer

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

POLL_S = 0.1
HEAR_S = 4.0  # one heartbeat and its timeout: a rank that stays silent for longer is absent
Say = Callable[[str], None]


class Cluster:
    """The nodes that serve a plan, as the server sees them. `open_cluster` creates it."""

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
        self.membership = Membership(plan, place, self._caller, roster, self.claim)
        self.current_run = CurrentRun(self.membership)
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
        """The head's address."""
        return self._caller.head

    def status(self) -> dict[str, Any]:
        """The reply of /status while vLLM does not run."""
        return dict(self._state)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Keep the control port open from before the first run until after the last."""
        self.control = ControlServer(self.plan.settings.control_port, self.status, lambda: False)
        with running(self.control):
            yield

    # --- before a run ---

    def prepare(self, lost: NodeLost | None) -> bool:
        """Wait for the nodes and check them; False after a stop signal.

        `lost` is the loss that ended the run before. Raises CLUSTER if the nodes do not answer in
        time or do not fit together; ENGINE_DIED if a lost node does not return.
        """
        self._set_state(starting=False)
        self._reminder = Reminder()
        deadline = time.monotonic() + self.plan.settings.cluster_wait_seconds
        while self._wait(lost, deadline):
            if self._check(lost, deadline):
                return not self.stop.is_set()
            self.claim.release()
            self.stop.wait(BEAT_S)
        return False

    def _wait(self, lost: NodeLost | None, deadline: float) -> bool:
        """Wait until all nodes are present and free; False after a stop signal.

        The deadline does not count while a rank downloads the model from here.
        """
        limit_s = self.plan.settings.cluster_wait_seconds
        while not self.stop.is_set():
            missing = self.membership.missing() or self._claim_nodes()
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

    def _claim_nodes(self) -> Missing | None:
        """Claim the nodes for this server; why not, if another server has them."""
        try:
            self.claim.take()
        except AgentError as error:
            if error.status:
                return Missing(str(error), "wait until it ends, or stop it")
            return Missing(f"no head answers at {self.head} ({error})", START_NODES)
        return None

    def _remind(self, text: str) -> None:
        if self._reminder.is_due(text, time.monotonic()):
            self.say(text)

    def _check(self, lost: NodeLost | None, deadline: float) -> bool:
        """Run the preflight. Returns False to try again: a node that has just returned may not be
        complete yet.

        Raises the first problem if no node was lost before, or ENGINE_DIED after the deadline.
        """
        topology = self.plan.topology
        nodes = head_first(living(self.membership.nodes()))
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
        self._say_passed(self.report)
        self.current_run.set_members(nodes if topology.nodes is not None else [])
        return True

    def _say_passed(self, report: Report) -> None:
        """Print the nodes and the bandwidth of a preflight that reached the all-reduce."""
        if not report.reduce:
            return
        names = ", ".join(
            f"{node['address']} ({node['facts']['interface']})" for node in report.nodes
        )
        self.say(
            f"preflight: {len(report.nodes)} nodes are compatible: {names}; all-reduce"
            f" {report.reduce['gb_per_s']} GB/s with {report.reduce['backend']} (at least"
            f" {report.reduce['least_gb_per_s']})"
        )

    def _preflight(self, nodes: Sequence[Mapping[str, Any]]) -> Report:
        """Compare and measure `nodes`. With Ray also check the model's folders, which every node
        loads from, and that Ray's head reaches every node.
        """
        settings, has_ray = self.plan.settings, self.plan.topology.mode == "ray"
        folders = model_folders(self.plan) if has_ray else []
        if settings.cluster_model == "head":
            problems = distribute(
                self._caller, nodes, self.place.address, folders, self.stop, self._say_detail
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
        return replace(report, problems=[Problem(self.head, why, action)] if why else [])

    def _say_detail(self, text: str) -> None:
        self._state["detail"] = text
        self.say(text)

    # --- a run ---

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of vLLM: `base` and this node's network variables. With Ray also the
        cluster's address and token.
        """
        network = {name: value for name, value in self.place.environ.items() if name not in base}
        environ = {**base, **network}
        if self.plan.topology.mode != "ray":
            return environ
        path = self._folder / "token"
        path.touch(mode=0o600)
        path.write_text(self._token)
        withhold_from_ray(environ)
        return environ | {
            "RAY_ADDRESS": f"{self.head}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(path),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def begin(self) -> Watch:
        """Begin a new run: headless ranks start vLLM too."""
        self._set_state(starting=True)
        self.membership.is_serving = True
        self.current_run.begin()
        return Watch(self)

    def ready(self) -> None:
        """The server answers: headless ranks report ready too."""
        self.current_run.was_ready = True
        if self._roster:
            self._roster.state = "ready"
        self.claim.release()

    def end(self, stopped: bool) -> None:
        """End the run: headless ranks end theirs, and stop too if the server was `stopped`."""
        self.claim.release()
        self.membership.is_serving = False
        if self._roster is None:
            with contextlib.suppress(AgentError):
                self._caller.ask(self.head, "/ended", {"server": self.claim.who}, 1.0)
        else:
            self._roster.state = "stopped" if stopped else "waiting"
            if stopped:
                self._wait_for_beats(self._roster)

    def _wait_for_beats(self, roster: Roster) -> None:
        """Wait until every rank has read the state with a heartbeat, for at most HEAR_S."""
        began = time.monotonic()
        while time.monotonic() - began < HEAR_S:
            others = [node for node in living(roster.nodes()) if node["rank"]]
            if all(node["seen"] > began for node in others):
                break
            time.sleep(POLL_S)
        time.sleep(POLL_S)  # for the reply to the last beat

    def explain(self, error: NibbleError, watch: Watch) -> NodeLost:
        """The lost node that explains why vLLM ended. Raises `error` if no node is lost."""
        if error.code != ExitCode.ENGINE_DIED or self.stop.is_set():
            raise error
        self._set_state(starting=False)
        self._state["detail"] = f"{error.what}; checking whether a node is lost"
        loss = self.who_was_lost()
        if isinstance(loss, NodeLost):
            return loss
        if self.current_run.was_ready and (why := watch.dead_worker()):
            return NodeLost(why)
        if self.stop.is_set():  # no other run follows, so `error` need not stop one
            return NodeLost(error.what)
        raise loss or error

    def who_was_lost(self) -> NibbleError | None:
        """After vLLM ended by itself: the loss behind it, if any. A node counts as lost after
        LOST_S without an answer.
        """
        deadline = time.monotonic() + LOST_S + 3 * BEAT_S
        while time.monotonic() < deadline and not self.stop.is_set():
            if loss := self.current_run.loss():
                return loss
            self.stop.wait(BEAT_S)
        return None

    def _set_state(self, starting: bool) -> None:
        self._state["detail"] = ""
        if self._roster:
            self._roster.run += starting
            self._roster.state = "starting" if starting else "waiting"
