"""A machine with ranks and without an API: its part of vLLM follows rank 0's runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.cluster.agent import Agent
from nibble.cluster.head import leaving, lost_head, refuse, running
from nibble.cluster.member import End, Member
from nibble.cluster.node import find_place, node_handlers, proof_handlers
from nibble.cluster.roster import BEAT_S
from nibble.cluster.token import members_token
from nibble.engine.contract import REPORT_FOLDER
from nibble.engine.log import ErrorReader
from nibble.engine.process import Ended, Engine, Event, Failed, Stop, Told
from nibble.errors import ExitCode, NibbleError
from nibble.machine.memory import MemorySource
from nibble.machine.processes import once_a_second, signal_name, stop_signals
from nibble.serve.control import ControlServer
from nibble.serve.failures import engine_died, part_ended, stopped_for_memory
from nibble.serve.watchdog import Action, Governor

if TYPE_CHECKING:
    from nibble.cluster.coordinator import Say
    from nibble.plan.plan import Plan

CODE_S = 1.0  # vLLM logs a worker's exit code within this time
# After this rank's part of vLLM ended: the time that rank 0 has to notice and begin a new run.
NEW_RUN_S = 30.0


def serve_headless(plan: Plan, environ: Mapping[str, str], say: Say) -> int:
    """Serve this machine's ranks until a stop signal or until rank 0 stops (0).

    Raises CLUSTER if the head refuses this node or begins no run, ENGINE_DIED if vLLM ends by
    itself or a lost head does not return, NO_FIT if memory runs short. Rank 0 verifies this node's
    worker reports.
    """
    settings = plan.settings
    head = str(plan.topology.head)
    token = members_token(settings, environ, f"rank {plan.topology.node_rank}")
    place = find_place(settings, environ, head)
    proof = tempfile.TemporaryDirectory(prefix="nibble-proof-", ignore_cleanup_errors=True)
    handlers = node_handlers(place, plan) | proof_handlers(Path(proof.name))
    agent = Agent(place.address, token, handlers, environ=environ)
    gpus = len(plan.hardware.gpus)
    rank = plan.topology.node_rank
    member = Member(head, token, place.address, "serve", rank, gpus, environ, place.facts)
    member.beat()
    refuse(member)
    say(f"rank {rank} of {plan.topology.nodes} at {place.address} ({place.interface}), head {head}")
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with proof, stop_signals(once_a_second(lambda signum: events.put(Stop(signum)))):

        def child_environ() -> dict[str, str]:
            return plan.vllm_environ(place.environ) | {REPORT_FOLDER: proof.name}

        node = _Headless(plan, member, child_environ, events, say)
        control = ControlServer(settings.control_port, node.status, node.is_ready)
        control.start()
        try:
            with running(agent), leaving(member):
                member.start()
                return node.run()
        finally:
            node.kill()
            control.close()


class _Headless:
    """The loop: wait for a run of the head, take part in it, end with it."""

    def __init__(
        self,
        plan: Plan,
        member: Member,
        environ: Callable[[], Mapping[str, str]],
        events: queue.SimpleQueue[Event],
        say: Say,
    ) -> None:
        self._plan, self._member, self._say = plan, member, say
        self._environ, self._events = environ, events
        self._engine: Engine | None = None
        self._governor: Governor | None = None
        self._over = threading.Event()  # the current run is over
        self._errors = ErrorReader()
        self._run = 0
        self._began = False
        self._ended: Ended | None = None
        self._lost, self._lost_at = "", 0.0  # vLLM's process that ended first, and when

    def status(self) -> dict[str, Any]:
        """The reply of /status."""
        reply, governor = self._member.reply, self._governor
        return {
            "state": "ready" if self.is_ready() else "starting",
            "phase": "headless" if self._engine else "cluster",
            "progress": None,
            "detail": lost_head(self._member) or f"rank 0 is {reply.get('state', 'silent')}",
            "rank": self._member.rank,
            "head": self._member.head,
            "run": self._run,
            "pid": os.getpid(),
            "engine_pid": self._engine.pid if self._engine else None,
            "memory": governor.to_json() if governor else None,
            "topology": self._plan.topology.to_json(),
        }

    def is_ready(self) -> bool:
        """Whether this rank runs in the head's current run and the server is ready."""
        alive = not self._member.has_lost_head and self._member.reply.get("state") == "ready"
        return alive and self._engine is not None and self._member.reply.get("run") == self._run

    def run(self) -> int:
        """Take part in one run after another; see `serve_headless`."""
        while True:
            if not self._wait_for_run():
                return ExitCode.OK
            self._start()
            if not self._take_part():
                return ExitCode.OK
            self.kill()
            self._member.ended = ()

    def kill(self) -> None:
        """End vLLM on this machine."""
        self._over.set()
        if self._governor is not None:
            self._governor.close()
            self._governor = None
        if self._engine is not None:
            self._engine.kill()
            self._engine = None

    def _wait_for_run(self) -> bool:
        """Wait until the head begins a run; False after a stop signal or if the server stopped."""
        limit_s = self._plan.settings.cluster_wait_seconds
        deadline = time.monotonic() + limit_s
        while True:
            if self._stopped():
                return False
            member = self._member
            refuse(member)
            reply = {} if member.has_lost_head else member.reply
            if reply.get("state") == "stopped":
                self._say("the server stopped, so this rank stops")
                return False
            session = reply.get("session")
            is_new = reply.get("run") != self._run or session != member.head_session
            if reply.get("state") in ("starting", "ready") and is_new:
                member.head_session, self._run = str(session), int(reply["run"])
                return True
            if time.monotonic() >= deadline:
                why = lost_head(member) or f"the head at {member.head} started no run"
                code = ExitCode.ENGINE_DIED if self._began else ExitCode.CLUSTER
                raise NibbleError(
                    code,
                    what=f"{why} within {limit_s} s",
                    expected="a server with rank 0",
                    action="start or restart rank 0",
                )

    def _start(self) -> None:
        """Start vLLM for this run, with its watchdog and a thread that waits for the first process
        to end.
        """
        self._began, self._ended, self._errors = True, None, ErrorReader()
        self._lost, self._lost_at = "", 0.0
        self._say(f"run {self._run} of the head: starting this machine's ranks")
        self._forget_earlier_run()
        self._engine = engine = Engine(self._plan.argv(), self._environ(), self._events)
        engine.start_reading(_pass_through, self._errors.feed)
        limit = self._plan.memory_limits

        def on_memory(action: Action, why: str) -> None:
            """End vLLM if memory runs out. The watchdog's thread calls this, so it must not block.
            Only rank 0 can pause admission.
            """
            if action == "stop":
                self._events.put(
                    Failed(stopped_for_memory("headless", why, limit, self._plan.ladder))
                )
                engine.kill_at_once()

        def report_first_death() -> None:
            """Also records the processes that `Engine.kill_at_once` kills. An event keeps the
            order: an error queued before is raised first.
            """
            for lost in itertools.islice(engine.deaths(over), 1):
                self._lost, self._lost_at = lost, time.monotonic()
                self._events.put(Told(lost))

        self._governor = Governor(MemorySource(), limit, on_memory)
        self._over = over = threading.Event()
        engine.run(self._governor.run)
        engine.run(report_first_death)

    def _forget_earlier_run(self) -> None:
        """Drop the earlier run's events from the queue. Keep a stop signal, which holds for every
        run.
        """
        dropped: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                dropped.append(self._events.get_nowait())
        for event in dropped:
            if isinstance(event, Stop):
                self._events.put(event)

    def _take_part(self) -> bool:
        """Wait until the run is over; False if this node or the server stops."""
        death, ended_at = None, 0.0
        member = self._member
        while True:
            if self._stopped():
                return False
            if why := lost_head(member):
                self._say(f"{why}: ending this machine's ranks")
                return True
            if member.reply.get("state") == "stopped":
                self._say("the server stopped, so this machine's ranks stop")
                return False
            if member.reply.get("run") != self._run or member.reply.get("state") == "waiting":
                self._say("the head ended this run")
                return True
            if self._ended and death is None:
                death, ended_at = self._death(self._ended.code), time.monotonic()
                self._say(f"{death.what}; waiting for the head's decision")
            if death is not None and time.monotonic() - ended_at > NEW_RUN_S:
                raise death

    def _death(self, code: int) -> NibbleError:
        """The error for vLLM's end here. Rank 0 reports the same cause."""
        how = f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
        has_killed = self._governor is not None and self._governor.kernel_has_killed()
        ladder = self._plan.ladder if has_killed else None
        return engine_died("headless", how, self._errors.cause, self._lost, ladder)

    def _tell_head(self) -> None:
        """Tell the head why vLLM ended here, so that it need not wait for a silence. vLLM logs the
        exit code just after the end.
        """
        deadline = self._lost_at + CODE_S
        while self._errors.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.02)
        has_killed = self._governor is not None and self._governor.kernel_has_killed()
        why = part_ended(
            self._lost or "vLLM", self._errors.cause, has_killed, self._errors.exit_code
        )
        if not self._member.ended:
            self._member.tell_end(End(self._run, 0, why, self._lost_at))

    def _stopped(self) -> bool:
        """Handle one event, or wait for half a heartbeat; True after a stop signal. Raises the
        error of a Failed event.
        """
        try:
            event = self._events.get(timeout=BEAT_S / 2)
        except queue.Empty:
            return False
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Ended):
            self._ended = event
            self._lost_at = self._lost_at or time.monotonic()
        # Without an engine, nibble ended vLLM itself.
        if isinstance(event, Told | Ended) and self._engine is not None:
            self._tell_head()
        if isinstance(event, Stop):
            self._say(f"{signal_name(event.signum)}: ending this machine's ranks")
        return isinstance(event, Stop)


def _pass_through(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        stream = sys.stdout if target == 1 else sys.stderr
        stream.buffer.write(data)
        stream.flush()
