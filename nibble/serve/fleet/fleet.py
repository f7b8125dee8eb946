"""Runs several models behind one port: loads, unloads and restarts their engines until a stop.

All decisions about memory are on paper: a model that loads, serves or is being unloaded counts
with its whole share until its process is gone, so two never exceed the machine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from nibble.engine.process import Stop
from nibble.engine.router.front import Front
from nibble.engine.router.table import Entry, Table
from nibble.engine.router.upstream import Upstream
from nibble.errors import ExitCode, NibbleError
from nibble.machine.processes import once_a_second, signal_name, stop_signals
from nibble.serve.fleet.budgets import Share
from nibble.serve.fleet.choose import Loaded, to_unload
from nibble.serve.fleet.engine_process import EngineProcess

POLL_S = 0.25
STOP_MARGIN_S = 30.0  # beyond the drain: vLLM's end took 10 s at most
# A server that was refused its start stays refused; one whose engine died may live again.
FINAL = (
    *(ExitCode.USAGE, ExitCode.NO_HARDWARE, ExitCode.MODEL, ExitCode.CONFIG, ExitCode.VERIFY),
    *(ExitCode.CLUSTER, ExitCode.CRASH_LOOP),
)
MOST_FAILURES = 6  # in a row, as the crash-loop breaker of each model counts
MEMORY_PAUSE_S = 60.0  # after the watchdog ended an engine
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0


@dataclass(eq=False)
class Member:
    """One model: its entry in the router's table, its memory, and how to start its engine."""

    entry: Entry
    share: Share
    words: Sequence[str]
    environ: Mapping[str, str]
    group: int = 0  # of GPUs; models of one group share memory
    process: EngineProcess | None = None
    is_unloading: bool = False
    failures: int = 0
    last_code: int = 0
    not_before_s: float = 0.0
    ended_for_memory: str = ""
    is_asleep: bool = False
    turning: Future[str] | None = None  # it is put to sleep, or woken

    @property
    def taken_bytes(self) -> int:
        """Its memory now, where it has a process."""
        return self.share.asleep_bytes if self.is_asleep else self.share.total_bytes

    waits_since_s: float = 0.0

    def loaded(self) -> Loaded:
        """For the decision what to unload."""
        is_ready = self.entry.state == "ready"
        running, used_s = self.entry.running, self.entry.last_used_s
        taken_bytes, stays = self.taken_bytes, self.share.stays
        kept_bytes = self.share.asleep_bytes if is_ready else 0
        return Loaded(self.entry.model, taken_bytes, running, used_s, stays, is_ready, kept_bytes)


def pause_s(failures: int) -> float:
    """Seconds before the next start: none after the first failure, then 5, 10, 20, … at most
    300.
    """
    if failures < 2:
        return 0.0
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (failures - 2))


class Fleet:
    """The main loop. `run` once, in the main thread; then `close`.

    `allowed_bytes` is what all models of a group may take. `start` starts an engine. `on_ready` is
    called once, when every model that stays is loaded; `on_drain` when a stop begins; `turn` each
    time the loop turns. No model loads while `is_short()`.
    """

    def __init__(
        self,
        members: Sequence[Member],
        allowed_bytes: int,
        table: Table,
        events: queue.SimpleQueue[Stop | None],
        drain_seconds: int,
        say: Callable[[str], None],
        start: Callable[[str, Sequence[str], Mapping[str, str]], EngineProcess] = EngineProcess,
        on_ready: Callable[[], None] = lambda: None,
        on_drain: Callable[[], None] = lambda: None,
        turn: Callable[[], None] = lambda: None,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        self.members, self.table = tuple(members), table
        self.allowed_bytes = allowed_bytes
        self._events, self._say = events, say
        self._drain_s = drain_seconds
        self._start = start
        self._on_ready, self._on_drain, self._turn = on_ready, on_drain, turn
        self._is_short = is_short
        self._was_ready = False
        self.is_draining = False

    # --- what others ask ---

    def missing(self) -> list[str]:
        """Models that stay loaded and are not ready."""
        return [one.entry.model for one in self.members if one.share.stays and not one.entry.admits]

    # --- the loop ---

    def run(self, front: Front) -> int:
        """Serve until a stop signal; the exit code. Raises NibbleError once no model can be
        loaded.
        """
        self._front = front
        with stop_signals(once_a_second(lambda signum: self._events.put(Stop(signum)))):
            while True:
                event = self._next()
                if isinstance(event, Stop):
                    return self._drain(event)
                self._step()

    def close(self) -> None:
        """End every engine that is left."""
        for member in self.members:
            if member.process is not None and member.process.ended_with() is None:
                member.process.kill()

    def _next(self) -> Stop | None:
        self._turn()
        try:
            return self._events.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _step(self) -> None:
        if self._front.error is not None:
            raise self._front.error
        for member in self.members:
            self._look_at(member)
        if all(member.entry.state == "failed" for member in self.members):
            raise self._all_failed()
        self._load_next()
        if not self._was_ready and not self.missing():
            self._was_ready = True
            self._on_ready()

    def _look_at(self, member: Member) -> None:
        process, entry = member.process, member.entry
        if process is None:
            if entry.state == "holding" and time.monotonic() >= member.not_before_s:
                self.table.set_state(entry, "unloaded")
        elif (code := process.ended_with()) is not None:
            self._ended(member, process, code)
        elif member.turning is not None:
            if member.turning.done():
                self._turned(member, process, member.turning.result())
        elif entry.state in ("loading", "holding") and not member.is_unloading:
            if process.is_ready():
                member.failures = 0
                self.table.make_ready(entry, Upstream(process.port), self._front.loop)
                self._say(f"{entry.model} is loaded")
            else:
                self._follow_breaker(member, process)

    def _turned(self, member: Member, process: EngineProcess, problem: str) -> None:
        """Its engine fell asleep or woke, or failed to: then it ends."""
        entry, member.turning = member.entry, None
        if problem:
            verb = "sleep" if member.is_unloading else "wake up"
            self._say(f"{entry.model} did not {verb} ({problem}); its engine ends")
            process.terminate() if member.is_unloading else process.kill_at_once()
        elif member.is_unloading:
            member.is_unloading, member.is_asleep = False, True
            self._close_upstream(entry)
            self.table.set_state(entry, "asleep")
            self._say(f"{entry.model} sleeps")
        else:
            member.failures = 0
            self.table.make_ready(entry, Upstream(process.port), self._front.loop)
            self._say(f"{entry.model} is awake")

    def _follow_breaker(self, member: Member, process: EngineProcess) -> None:
        """A server that waits after failed starts says so; requests do not wait for it."""
        status = process.status()
        is_holding = status.get("state") == "holding"
        if is_holding and member.entry.state == "loading":
            self._unavailable(member, "holding", str(status.get("detail", "")))
        elif status and not is_holding and member.entry.state == "holding":
            self.table.set_state(member.entry, "loading")

    def _ended(self, member: Member, process: EngineProcess, code: int) -> None:
        entry, member.process = member.entry, None
        member.is_asleep, member.turning = False, None
        self._close_upstream(entry)
        if member.is_unloading:
            member.is_unloading = False
            self.table.set_state(entry, "unloaded")
            return
        member.failures += 1
        member.last_code = code
        reason = process.error or f"its server ended with code {code}"
        if for_memory := member.ended_for_memory:
            member.ended_for_memory = ""
            member.last_code, reason = ExitCode.NO_FIT, for_memory
        if code in FINAL or member.failures >= MOST_FAILURES:
            self._say(f"{entry.model} is not available any more: {reason}")
            self._unavailable(member, "failed", reason)
            return
        wait_s = pause_s(member.failures)
        if for_memory:
            wait_s = max(wait_s, MEMORY_PAUSE_S)
        member.not_before_s = time.monotonic() + wait_s
        again = "is loaded again" if member.share.stays or entry.waiters else "loads on demand"
        self._say(f"{entry.model} ended: {reason}; it {again} after {wait_s:.0f} s")
        if wait_s:
            self._unavailable(member, "holding", reason)
        else:
            self.table.set_state(entry, "unloaded", reason)

    def _close_upstream(self, entry: Entry) -> None:
        if entry.upstream is not None:
            self._front.loop.call_soon_threadsafe(entry.upstream.close)
            entry.upstream = None

    def _unavailable(self, member: Member, state: str, reason: str) -> None:
        self.table.set_state(member.entry, "failed" if state == "failed" else "holding", reason)
        self.table.refuse_waiting(member.entry, reason, self._front.loop)

    def _all_failed(self) -> NibbleError:
        last = self.members[-1]
        known = last.last_code in set(ExitCode) and last.last_code != ExitCode.OK
        code = ExitCode(last.last_code) if known else ExitCode.ENGINE_DIED
        reasons = "; ".join(f"{one.entry.model}: {one.entry.reason}" for one in self.members)
        return NibbleError(code, what=f"no model can be loaded: {reasons}")

    # --- loading ---

    def _load_next(self) -> None:
        """Begin one load for each group of GPUs, or make room for it. One model of a group loads at
        a time: vLLM measures memory.
        """
        for group in {one.group for one in self.members}:
            self._load_in([one for one in self.members if one.group == group])

    def _load_in(self, members: Sequence[Member]) -> None:
        wish = self._wish(members)
        others = [one for one in members if one.process is not None]
        leaving: tuple[str, ...] = ()
        if self._is_short():
            wish = None
        if wish is not None and not any(one.is_unloading or _loads(one) for one in others):
            loaded = [one.loaded() for one in others]
            more_bytes = wish.share.total_bytes - (wish.taken_bytes if wish.is_asleep else 0)
            leaving = to_unload(loaded, more_bytes, self.allowed_bytes) or ()
            fits = sum(one.total_bytes for one in loaded) + more_bytes
            if not leaving and fits <= self.allowed_bytes:
                self._load(wish)
        for one in others:
            if one.entry.model in leaving:
                self._unload_when_idle(one, wish)
            elif one.entry.is_leaving and not one.is_unloading:
                self.table.stop_leaving(one.entry, self._front.loop)

    def _wish(self, members: Sequence[Member]) -> Member | None:
        """The model to load next: those that stay first, then the one whose requests wait
        longest.
        """
        now = time.monotonic()
        for member in members:
            if not member.entry.waiters:
                member.waits_since_s = now
        able = [
            one
            for one in members
            if one.entry.state in ("unloaded", "asleep") and now >= one.not_before_s
        ]
        wanted = [one for one in able if one.share.stays or one.entry.waiters]
        return min(wanted, key=lambda one: (not one.share.stays, one.waits_since_s), default=None)

    def _load(self, member: Member) -> None:
        self.table.set_state(member.entry, "loading")
        if member.is_asleep and member.process is not None:
            member.is_asleep = False
            member.turning = in_thread(member.process.wake)
            self._say(f"waking {member.entry.model}")
            return
        member.process = self._start(member.entry.model, member.words, member.environ)
        self._say(f"loading {member.entry.model} (pid {member.process.pid})")

    def _unload_when_idle(self, member: Member, wish: Member | None) -> None:
        if self.table.begin_leaving(member.entry) and member.process is not None:
            self.table.set_state(member.entry, "unloading")
            member.is_unloading = True
            if member.share.sleeps:
                member.turning = in_thread(member.process.sleep)
            else:
                member.process.terminate()
            what = wish.entry.model if wish else "another model"
            self._say(f"unloading {member.entry.model} for {what}")

    # --- the end ---

    def _drain(self, event: Stop) -> int:
        self.is_draining = True
        self._on_drain()
        running = sum(one.entry.running for one in self.members)
        self._say(
            f"{signal_name(event.signum)}: {running} running requests may take"
            f" {self._drain_s} s to finish"
        )
        for member in self.members:
            self.table.refuse_waiting(member.entry, "the server stops", self._front.loop)
        alive = [one.process for one in self.members if one.process is not None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + self._drain_s + STOP_MARGIN_S
        codes: list[int] = []
        while alive and time.monotonic() < deadline:
            if isinstance(self._next(), Stop):
                for process in alive:
                    process.terminate()
            ended = [one for one in alive if one.ended_with() is not None]
            codes += [one.ended_with() or 0 for one in ended]
            alive = [one for one in alive if one not in ended]
        if alive or ExitCode.TERMINATED in codes:
            self._say("ended before the drain was done")
            return ExitCode.TERMINATED
        self._say("drained and stopped")
        return ExitCode.ENGINE_DIED if any(codes) else ExitCode.OK


def in_thread(call: Callable[[], str]) -> Future[str]:
    """The result of `call`, which takes seconds, from a separate thread."""
    found: Future[str] = Future()
    found.set_running_or_notify_cancel()
    threading.Thread(target=lambda: found.set_result(call()), daemon=True).start()
    return found


def _loads(member: Member) -> bool:
    return member.entry.state == "loading"
