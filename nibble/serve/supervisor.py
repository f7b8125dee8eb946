"""Runs vLLM under a small supervisor: start, watch, admit, drain, end; and its exit code."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nibble.canary.verification import Proof
from nibble.engine.api import (
    Api,
    answer_one_token,
    decode_rate,
    is_healthy,
    lists_models,
    reachable_host,
    requests_in_flight,
)
from nibble.engine.gate.admission import Admission
from nibble.engine.installed import build_id
from nibble.engine.log import DrainReader, ErrorReader, PhaseReader, PhaseUpdate, message
from nibble.engine.process import Answering, Ended, Engine, Event, Failed, Stop, Told, child_environ
from nibble.errors import ExitCode, NibbleError
from nibble.machine import early_stop
from nibble.machine.memory import MemorySource
from nibble.machine.process_table import Activity, activity
from nibble.machine.processes import once_a_second, signal_name, stop_signals
from nibble.plan.memory import UNWATCHED, Limits, show_gib
from nibble.printable import printable
from nibble.serve.above import internal_token
from nibble.serve.api_key import KeyDecision
from nibble.serve.control import Answers, ControlServer
from nibble.serve.drain import drain, until_it_ends
from nibble.serve.failures import engine_died, kept, stopped_for_memory
from nibble.serve.hang.end import HangEnd
from nibble.serve.hang.watch import HangWatch
from nibble.serve.live import Live
from nibble.serve.progress import Display, StallWatch, stderr_is_terminal
from nibble.serve.ready_message import reached, ready_lines
from nibble.serve.run_folder import make_run_folder, socket_environ
from nibble.serve.sd_notify import Heartbeat, Notifier
from nibble.serve.start_times import StartTimes, Timeline
from nibble.serve.watchdog import Action, Governor

if TYPE_CHECKING:
    from nibble.plan.plan import Plan
    from nibble.serve.nodes import Nodes

LOADING_STOP_S = 5.0
SUCCESS_S = 600.0  # a server that was ready for so long resets the crash loop
ENGINE_END_S = 15.0  # vLLM needs 5 s after a lost worker
_POLL_S = 0.05
_IDLE_POLL_S = 1.0
_LINE_CHARS = 300


def serve(
    plan: Plan,
    environ: Mapping[str, str],
    key: KeyDecision,
    limit: Limits = UNWATCHED,
    on_success: Callable[[], None] = lambda: None,
    on_ready: Callable[[], None] = lambda: None,
    start_times: StartTimes | None = None,
    watch: Nodes | None = None,
    references: Callable[[], Mapping[str, Path]] = dict,
    failed_starts: int = 0,
) -> int:
    """Run the plan until a stop signal; returns the exit code (errors.ExitCode). Call it from the
    main thread.

    0: stopped by a signal, all requests answered. 143: time ran out, or a second signal came, with
    requests running. Raises NibbleError where vLLM ended by itself (ENGINE_DIED), for memory below
    `limit` (NO_FIT), a control port in use (CONFIG) and an unexpected kernel or a wrong answer
    (CANARY). No process of vLLM is left. `on_ready` runs in a separate thread when the server is
    ready, `on_success` after SUCCESS_S of that; `start_times` has the last start of this plan.
    `watch` follows the other machines, if any; `references` waits for computed references for the
    canary, by activations. `failed_starts` of this plan failed in a row before this one.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def tell(signum: int) -> None:
        events.put(Stop(signum))
        if watch is not None:  # also without a run that takes the event
            watch.told_to_stop()

    with stop_signals(once_a_second(tell)):
        if watch is not None and watch.was_told_to_stop():
            events.put(Stop(signal.SIGTERM))
        supervisor = Supervisor(
            *(plan, environ, key, events, limit, on_success, on_ready, start_times, watch),
            *(references, failed_starts),
        )
        try:
            return int(supervisor.run())
        finally:
            supervisor.close()
            early_stop.over()


class Supervisor:
    """One run of vLLM. `run` once, then `close`."""

    def __init__(
        self,
        plan: Plan,
        environ: Mapping[str, str],
        key: KeyDecision,
        events: queue.SimpleQueue[Event],
        limit: Limits,
        on_success: Callable[[], None],
        on_ready: Callable[[], None],
        start_times: StartTimes | None,
        watch: Nodes | None,
        references: Callable[[], Mapping[str, Path]] = dict,
        failed_starts: int = 0,
    ) -> None:
        settings = plan.settings
        self._plan, self._key, self._events = plan, key, events
        self._on_success, self._on_ready, self._watch = on_success, on_ready, watch
        self._timeline = Timeline(start_times or StartTimes(None))
        self._phases, self._drain_log, self._errors = PhaseReader(), DrainReader(), ErrorReader()
        self._last_line = ""  # of the log, while vLLM starts: later lines can hold requests
        self._lost = ""  # the first process of vLLM's that ended, where it was not the API server
        self._lock = threading.Lock()
        self._over = threading.Event()
        tls = "--ssl-certfile" in plan.args
        self._api = Api(reachable_host(settings.host), settings.port, internal_token(environ), tls)
        gpus = [gpu.index for gpu in plan.hardware.gpus] if plan.target.device == "cuda" else []
        live = Live(self.status, self._why, self._api, gpus, settings.stall_seconds, failed_starts)
        answers = Answers(
            self.status, self._is_ready, self._why, live.to_json, live.metrics, self._api
        )
        # Where other machines are looked after, the port is open before this run and after it.
        if watch is not None:
            self._control = watch.control(answers)
        else:
            self._control = ControlServer(settings.control_port, answers.status, answers.is_ready)
            self._control.answers = answers
        self._notifier = Notifier(os.environ)
        self._heartbeat = Heartbeat(self._notifier, settings.control_port)
        self._governor = Governor(MemorySource(), limit, self._on_memory)
        self._limit = limit
        self._folder = make_run_folder()
        self._admission = Admission(self._folder / "gate")
        elsewhere = watch.reports if watch else dict
        self._proof = Proof(plan, self._folder / "proof", self._api, elsewhere, references)
        self._hangs = HangWatch(
            settings.hang_seconds,
            self._folder / "pulse",
            self._api,
            plan.target.device == "cpu",
            lambda: self._admission.state in ("ready", "paused"),
            lambda hang: self._end_of_hang(hang),  # noqa: PLW0108 - made below, since it needs the engine
            plan.topology.spans_machines,
        )
        base = socket_environ(plan, self._folder) | plan.vllm_environ(environ)
        base |= self._proof.environ() | self._hangs.environ()
        base["NIBBLE_GATE_CONTROL"] = str(settings.control_port)
        base["NIBBLE_GATE_PROFILER"] = str(int("--profiler-config" in plan.args))
        child = child_environ(base, self._admission.path, self._api.internal_token, key.key)
        # Last: what fails above leaves no process behind.
        self._engine = Engine(plan.argv(), child, events, self._folder)
        self._display = Display(silence=self._engine.silence)
        self._end_of_hang = HangEnd(
            self._engine,
            self._admission,
            events,
            lambda: self._timeline.phase,
            self._display.say,
            gpus,
        )

    # --- from start to end ---

    def run(self) -> ExitCode:
        """Start vLLM, serve and stop; see `serve`."""
        self._control.start()
        self._display.start()
        self._show(PhaseUpdate("start"))
        self._engine.start_reading(self._display.pass_through, self._read)
        self._engine.run(self._probe)
        self._engine.run(self._governor.run)
        self._engine.run(self._watch_processes)
        self._engine.run(lambda: self._hangs.run(self._engine.pid, self._over))
        self._engine.run(lambda: self._hangs.ask_api(self._over))
        self._engine.run(lambda: self._heartbeat.run(self._over))
        if (watch := self._watch) is not None:
            self._engine.run(
                lambda: watch.run(self._on_lost_node, self._on_leaving_head, self._over)
            )
        code = self._until_ready()
        return self._until_told() if code is None else code

    def close(self) -> None:
        """End everything of vLLM, however `run` ended."""
        self._over.set()
        self._governor.close()
        self._display.stop()
        if stuck := self._engine.kill():
            self._display.say(f"warning: these processes cannot be killed: {stuck}")
        self._admission.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._control.close()  # last: it answers as long as anything of vLLM is left

    def status(self) -> dict[str, Any]:
        """The answer of /status, without secrets."""
        return {
            "state": self._admission.state,
            **self._timeline.to_json(),
            "last_sign_of_life_age_s": round(self._engine.silence(), 1),
            "last_line": self._last_line,
            "lost": self._lost,
            **self._proof.to_json(),
            "facts": dict(self._phases.facts),
            "memory": self._governor.to_json(),
            "hang": self._hangs.to_json(),
            "url": f"{self._api.url}/v1",
            "pid": os.getpid(),
            "build": build_id(),
            "engine_pid": self._engine.pid,
            "served_names": list(self._plan.served_names),
            "plan": self._plan.to_json(),
        }

    def _is_ready(self) -> bool:
        return self._admission.state == "ready"

    def _why(self) -> str:
        return self._admission.phase

    def _next(self, timeout_s: float | None) -> Event | None:
        self._heartbeat.turn()
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Told):
            self._display.say(event.text)
            return None
        return event

    # --- start-up ---

    def _until_ready(self) -> ExitCode | None:
        """None when the server answers; else the exit code."""
        stall = StallWatch(self._plan.settings.stall_seconds)
        earlier = Activity(0.0, None)
        while True:
            event = self._next(_IDLE_POLL_S)
            if isinstance(event, Ended):
                return self._died(event.code)
            if isinstance(event, Stop):
                return self._stop_loading(event)
            if isinstance(event, Answering):
                self._open()
                return None
            if stall.due(self._engine.silence()):
                now = activity(self._engine.pid)
                self._display.say(
                    f"{self._timeline.phase}: no progress for {self._engine.silence():.0f} s;"
                    f" meanwhile the engine used {now.since(earlier)}. nibble waits; Ctrl-C or"
                    " SIGTERM stops it"
                )
            elif self._engine.silence() < _IDLE_POLL_S:
                earlier = activity(self._engine.pid)

    def _open(self) -> None:
        if self._generates is not False:
            self._hangs.generating_name = self._plan.served_names[0]
        with self._lock:
            self._show(PhaseUpdate("ready"))
        self._display.stop()
        self._notifier.send(
            "READY=1", f"STATUS=serving {self._plan.served_names[0]} at {self._api.url}"
        )
        self._timeline.keep()
        seconds = self._timeline.seconds
        generates = self._generates is not False
        names, facts = self._plan.served_names, self._phases.facts
        terminal = stderr_is_terminal()
        for line in ready_lines(
            self._api.url, names, generates, self._key, seconds, facts, terminal
        ):
            self._display.say(line)
        self._engine.run(self._on_ready)

    def _stop_loading(self, event: Stop) -> ExitCode:
        self._display.stop()
        self._admission.set("draining", "drain")
        self._display.say(
            f"{signal_name(event.signum)} during {self._timeline.phase}: stopping; no server was"
            " running"
        )
        self._engine.terminate()
        until_it_ends(self._next, self._drain_log, time.monotonic() + LOADING_STOP_S)
        return ExitCode.OK

    @property
    def _generates(self) -> bool | None:
        """Whether the model generates text; None if the log did not say."""
        return None if self._phases.tasks is None else "generate" in self._phases.tasks

    def _probe(self) -> None:
        """Send requests until the server answers, often once the log shows that it listens."""
        waited = 0.0
        while not self._over.is_set():
            if self._phases.http_is_up or waited >= _IDLE_POLL_S:
                waited = 0.0
                if self._is_answering():
                    self._events.put(Answering())
                    return
            self._over.wait(_POLL_S)
            waited += _POLL_S

    def _is_answering(self) -> bool:
        """Whether the server answers correctly. The first request is the supervisor's."""
        names, generates = self._plan.served_names, self._generates is not False
        if not lists_models(self._api, names):
            return False
        try:
            if generates:
                answer_one_token(self._api, names[0], required=bool(self._generates))
            with self._lock:
                self._phases.phase = "canary"
                self._show(PhaseUpdate("canary"))
            self._proof.run(names, generates, self._display.say)
            if generates and self._plan.target.device == "cpu":
                self._phases.facts |= reached(decode_rate(self._api, names[0]), self._plan.bound)
        except OSError:  # vLLM went away: its end arrives as a separate event
            return False
        return True

    # --- serving and stopping ---

    def _until_told(self) -> ExitCode:
        success_at: float | None = time.monotonic() + SUCCESS_S
        while True:
            # Short waits: CPython handles a signal that arrives just before a wait only after the
            # wait (1 of 3000 signals, on two busy cores).
            event = self._next(_IDLE_POLL_S)
            if isinstance(event, Stop):
                return self._drain(event)
            if isinstance(event, Ended):
                self._died(event.code)
            if success_at is not None and time.monotonic() >= success_at:
                success_at = None
                self._on_success()

    def _drain(self, event: Stop) -> ExitCode:
        self._admission.set("draining", "drain")
        self._notifier.send("STOPPING=1")
        self._hangs.hurry()
        end = drain(
            event,
            self._plan.settings,
            self._next,
            lambda: requests_in_flight(self._api),
            self._engine.terminate,
            self._drain_log,
            self._display.say,
        )
        return self._died(end.code) if isinstance(end, Ended) else end

    def _died(self, code: int) -> NoReturn:
        self._display.stop()
        self._engine.last_words()
        raise self._death(
            f"exit code {code}" if code >= 0 else f"API server killed by {signal_name(-code)}"
        )

    def _death(self, how: str) -> NibbleError:
        if self._end_of_hang.error is not None:
            return self._end_of_hang.error
        ladder = self._plan.ladder if self._governor.kernel_has_killed() else None
        lost = "" if "killed" in how else self._lost
        return engine_died(self._timeline.phase, how, self._errors.cause, lost, ladder)

    def _watch_processes(self) -> None:
        """Record the first vLLM process that ends, and end the rest if vLLM is broken without it
        and stays.
        """
        for lost in self._engine.deaths(self._over):
            if self._admission.state == "draining":
                return
            self._lost = lost
            if self._watch is not None:
                self._watch.died_here()
            if self._over.wait(ENGINE_END_S):
                return
            if self._admission.state in ("ready", "paused") and not is_healthy(self._api):
                self._events.put(Failed(self._death(f"it still ran {ENGINE_END_S:.0f} s later")))
                return
            self._lost = ""  # vLLM continues without it

    def _on_lost_node(self, error: NibbleError) -> None:
        """Stop admission and end the engine with the error: requests in flight would never end."""
        self._admission.change("ready", "paused", "a node of the cluster is lost")
        self._events.put(Failed(error))

    def _on_leaving_head(self, why: str) -> None:
        """Stop as after a signal."""
        self._events.put(Told(why))
        self._events.put(Stop(signal.SIGTERM))

    # --- memory ---

    def _on_memory(self, action: Action, why: str) -> None:
        """Act on the watchdog's decision in its thread: nothing here may wait."""
        if action == "stop":
            error = stopped_for_memory(self._timeline.phase, why, self._limit, self._plan.ladder)
            self._events.put(Failed(error))
            self._engine.kill_at_once()
        elif action == "pause":
            # All clients can read /health and /ready: omit the path of the cgroup.
            reason = (
                f"memory is short: {show_gib(self._governor.available_bytes)}, {kept(self._limit)}"
            )
            if self._admission.change("ready", "paused", reason):
                until = show_gib(self._limit.resume_from_bytes)
                self._events.put(
                    Told(
                        f"new requests get 503 until {until} are available: {why},"
                        f" {kept(self._limit)}"
                    )
                )
        elif self._admission.change("paused", "ready", "ready"):
            self._events.put(Told(f"new requests are admitted again: {why}"))

    # --- what the engine says ---

    def _read(self, line: str) -> None:
        with self._lock:  # two threads read, one for each stream
            self._errors.feed(line)
            self._drain_log.feed(line)
            if self._watch is not None:
                self._watch.feed(line)
            if self._admission.state != "starting":
                return
            self._last_line = printable(message(line))[:_LINE_CHARS] or self._last_line
            if update := self._phases.feed(line):
                self._show(update)

    def _show(self, update: PhaseUpdate) -> None:
        self._timeline.go_to(update)
        self._admission.change(
            "starting", "ready" if update.phase == "ready" else "starting", update.phase
        )
        if update.phase != "ready":  # ready_lines says that
            self._display.show(update)
