"""`ray start --block` as a child process: its output, its end, memory, and an orderly stop."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nibble.cluster.ray_failure import ended_processes, explain_failure
from nibble.cluster.ray_workers import RayWorkers
from nibble.cluster.roster import STOPPING, Roster
from nibble.errors import ExitCode, NibbleError
from nibble.machine.memory import MemorySource
from nibble.machine.process_table import Doomed, family, kill_family
from nibble.machine.processes import become_subreaper, die_with_parent, signal_name, stop_signals
from nibble.plan.memory import UNWATCHED, Limits, show_gib
from nibble.serve.failures import kept
from nibble.serve.progress import Display
from nibble.serve.watchdog import Action, Governor

START_S = 180.0  # a start takes seconds; nibble ends one that takes longer than this
STOP_S = 10.0
WATCH_S = 2.0
DRAIN_POLL_S = 0.2
_STARTED = "Ray runtime started."
_KEPT_LINES = 400
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class RayProcess:
    """One node's Ray. Its output is held back; `up` is printed once Ray has started."""

    command: list[str]
    environ: Mapping[str, str]
    role: str
    head: str
    up: Sequence[str]
    on_up: Callable[[], object] = lambda: None
    workers: RayWorkers | None = None
    lost: Callable[[], str | None] = lambda: None
    limit: Limits = UNWATCHED
    roster: Roster | None = None
    _events: queue.SimpleQueue[int | str | NibbleError] = field(default_factory=queue.SimpleQueue)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    _is_up: bool = False
    _doomed: Doomed = field(default_factory=Doomed)
    _display: Display = field(default_factory=lambda: Display(silence=lambda: 0.0, live=False))

    def run(self) -> int:
        """Run until Ray ends or a signal comes, then kill every process of Ray; the exit code."""
        become_subreaper()
        with stop_signals(lambda signum: self._events.put(signal_name(signum))):
            child = subprocess.Popen(
                self.command,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - see above
            )
            self._doomed = Doomed(child.pid)
            reader = threading.Thread(target=self._read, args=(child,), daemon=True)
            reader.start()
            threading.Thread(target=lambda: self._events.put(child.wait()), daemon=True).start()
            governor = Governor(MemorySource(), self.limit, self._on_memory)
            threading.Thread(target=governor.run, daemon=True).start()
            over = threading.Event()
            if (workers := self.workers) is not None:
                threading.Thread(
                    target=lambda: workers.watch(child.pid, governor, over), daemon=True
                ).start()
            try:
                return self._wait(child, reader)
            finally:
                over.set()
                governor.close()
                kill_family(child.pid)

    def _on_memory(self, action: Action, why: str) -> None:
        """Kill Ray if memory runs out. The watchdog's thread calls this, so it must not block.

        `run` kills processes that started after the last look at the family.
        """
        if action == "stop":
            what = f"stopped Ray and vLLM's part on this node: {why}, {kept(self.limit)}"
            expected = f"at least {show_gib(self.limit.stop_below_bytes)}"
            advice = "serve with less memory (`nibble plan`), or end other programs on this node"
            self._events.put(
                NibbleError(ExitCode.NO_FIT, what=what, expected=expected, action=advice)
            )
            self._doomed.kill()

    def _wait(self, child: subprocess.Popen[bytes], reader: threading.Thread) -> int:
        event = self._next_event(child.pid)
        if isinstance(event, NibbleError):
            raise event
        if isinstance(event, str):
            self._stop(child, event)
            return ExitCode.OK
        if event is None and not self._is_up:
            what = f"Ray has not started within {START_S:.0f} s"
            action = "check that the head answers, and run again with NIBBLE_DEBUG=1"
            raise NibbleError(ExitCode.CLUSTER, what=what, action=action)
        reader.join(timeout=2)
        if not self._is_up:
            raise explain_failure(self._lines, self.role, self.head)
        if why := self.lost():
            self._display.say(f"{why}: stopping Ray")
            return ExitCode.ENGINE_DIED
        how = (
            f"exit code {event}{ended_processes(self._lines)}"
            if event is not None
            else "its node process ended"
        )
        self._display.say(f"Ray ended by itself ({how})")
        return ExitCode.ENGINE_DIED

    def _stop(self, child: subprocess.Popen[bytes], signal_: str) -> None:
        """Let servers drain, then end Ray with SIGTERM."""
        self._let_servers_drain(signal_)
        self._display.say(f"{signal_}: stopping Ray")
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        with contextlib.suppress(queue.Empty):  # its end, or a second signal
            self._events.get(timeout=STOP_S)

    def _let_servers_drain(self, signal_: str) -> None:
        """Tell the servers that this head stops, and wait until they have ended.

        A server reads the state with its next request for the nodes. A second signal and the end of
        Ray end the wait.
        """
        roster = self.roster
        if roster is None or not (limit_s := roster.servers_stop_within_s()):
            return
        self._display.say(
            f"{signal_}: the server that runs on this cluster drains first, for up to"
            f" {limit_s:.0f} s"
        )
        roster.state = STOPPING
        deadline = time.monotonic() + limit_s
        while roster.servers_stop_within_s() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=DRAIN_POLL_S)
                if isinstance(event, NibbleError):
                    raise event
                return

    def _next_event(self, session: int) -> int | str | NibbleError | None:
        """Wait for a signal's name, Ray's return code or the watchdog's error.

        None if Ray does not start in time, its node process has ended, or the head is lost. `ray
        start --block` takes a raylet or GCS that ended on SIGTERM for a planned stop and goes on
        blocking.
        """
        needed = {"raylet", "gcs_server"} if self.role == "head" else {"raylet"}
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=WATCH_S)
            if not self._is_up and time.monotonic() >= deadline:
                return None
            processes = family(session)
            self._doomed.look(processes)
            if self._is_up and not needed <= {process.name for process in processes}:
                return None
            if self._is_up and self.lost():
                return None

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        """Keep Ray's last lines, and print `up` once Ray says that it has started."""
        assert child.stdout is not None
        verbose = self.environ.get("NIBBLE_DEBUG", "0") not in ("", "0")
        for raw in child.stdout:
            line = _ANSI.sub("", raw.decode(errors="replace")).rstrip()
            self._lines.append(line)
            if verbose:
                self._display.pass_through(2, raw)
            if not self._is_up and _STARTED in line:
                self._is_up = True
                self.on_up()
                for text in self.up:
                    self._display.say(text)
