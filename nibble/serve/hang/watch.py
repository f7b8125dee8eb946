"""The hang watch: checks vLLM's processes every few seconds, and reports when one stops moving.

rules.py decides; this module reads /proc, the plugin's pulses, the API server and the processes'
stacks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nibble.engine.api import Api
from nibble.engine.contract import PULSE_FOLDER
from nibble.engine.contract.pulse import HEALTH
from nibble.engine.pulse import read_pulses
from nibble.engine.stack_dump import dump_stacks
from nibble.machine.process_table import Process, engine_title, family
from nibble.machine.processes import major_faults
from nibble.serve.hang.rules import Look, Seen, Stall, Stalls, excuse

_LOOKS = 12  # within the limit
_SHORTEST_S, _LONGEST_S = 0.25, 5.0
DRAIN_STOPPED_S = 5.0
API = "API server"


@dataclass(frozen=True)
class Hang:
    """The processes that do not move, and the stacks: process name -> text."""

    stall: Stall
    stacks: Mapping[str, str]


class HangWatch:
    """Made before vLLM starts; `run` is the loop, `ask_api` a second one, each in a separate
    thread.

    `on_hang` is called once, from the loop, which ends with it. `is_serving` says whether the API
    server should answer now.
    """

    def __init__(
        self,
        limit_s: float,
        folder: Path,
        api: Api,
        on_cpu: bool,
        is_serving: Callable[[], bool],
        on_hang: Callable[[Hang], None],
        has_other_machines: bool = False,
    ) -> None:
        self.limit_s, self._folder, self._api, self._on_cpu = limit_s, folder, api, on_cpu
        self._is_serving, self._on_hang = is_serving, on_hang
        self._has_other_machines = has_other_machines
        self._interval_s = min(max(limit_s / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._stalls = Stalls(limit_s)
        self._last: Look | None = None
        self._answers = 0
        self._dumped: tuple[float, dict[str, str]] = (float("-inf"), {})
        self.generating_name: str | None = None  # of the model, where it generates text
        folder.mkdir()

    def environ(self) -> dict[str, str]:
        """Variables for vLLM's processes."""
        return {PULSE_FOLDER: str(self._folder)}

    def hurry(self) -> None:
        """Shorten the limit for a stopped process: a drain has begun."""
        self._stalls.stopped_limit_s = min(self.limit_s, DRAIN_STOPPED_S)
        self._interval_s = min(self._interval_s, 1.0)

    def to_json(self) -> dict[str, Any]:
        """For /status."""
        pulses = self._last.pulses if self._last else ()
        return {
            "limit_s": self.limit_s,
            "waited_s": round(self._stalls.longest_s, 1),
            "has_pulse": any(one.kind == "engine" for one in pulses),
        }

    def run(self, engine_pid: int, over: threading.Event) -> None:
        """Watch until `over` or until vLLM hangs."""
        while self.limit_s and not over.wait(self._interval_s):
            look = self._look(engine_pid)
            stalls, last = self._stalls.feed(look), self._last
            self._last = look
            for stall in stalls:
                if last is not None and self._is_hang(stall, look, last):
                    self._on_hang(Hang(stall, self._dump(look, stall.kind == "stopped")))
                    return

    def ask_api(self, over: threading.Event) -> None:
        """Send requests to the API server until `over`, to see whether it answers."""
        while self.limit_s and not over.wait(self._interval_s):
            if self._is_serving():
                with contextlib.suppress(OSError):
                    self._api.call(HEALTH, timeout_s=self.limit_s)
                    self._answers += 1

    def _look(self, engine_pid: int) -> Look:
        members = family(engine_pid)
        seen = tuple(found for one in members if (found := _seen(one, engine_pid)))
        programs = frozenset(one.name for one in members)
        answers = self._answers if self._is_serving() else None
        return Look(time.monotonic(), seen, read_pulses(self._folder), answers, programs)

    def _is_hang(self, stall: Stall, look: Look, last: Look) -> bool:
        if excuse(stall, look, last, self._on_cpu):
            return False
        if stall.kind == "untaken":
            # Some requests wait for their client and not for the engine (sessions of
            # /v1/realtime): a new request shows which.
            if self._takes_a_request():
                self._stalls.forget(stall)
                return False
            return True
        if stall.kind != "step":
            return True
        stacks = "\n".join(self._dump(look, wake=False).values())
        return not excuse(stall, look, last, self._on_cpu, stacks, self._has_other_machines)

    def _takes_a_request(self) -> bool:
        if (name := self.generating_name) is None:
            return True  # the model does not generate: no cheap request exists
        try:
            self._api.call(
                "/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 1}, self.limit_s
            )
        except OSError:
            return False
        return True

    def _dump(self, look: Look, wake: bool) -> dict[str, str]:
        """The stacks of all vLLM processes; recent ones are reused."""
        at_s, stacks = self._dumped
        if wake or look.at_s - at_s >= self.limit_s:
            texts = dump_stacks(self._folder, [one.pid for one in look.processes], wake)
            stacks = {one.name: texts[one.pid] for one in look.processes}
            self._dumped = look.at_s, stacks
        return stacks


def _seen(process: Process, engine_pid: int) -> Seen | None:
    """A process of vLLM; None for a helper such as a compiler."""
    title = engine_title(process.pid) or (API if process.pid == engine_pid else None)
    if title is None:
        return None
    traced = process.state == psutil.STATUS_TRACING_STOP or _is_traced(process.pid)
    return Seen(
        process.pid,
        title,
        process.state,
        traced,
        process.cpu_seconds,
        major_faults(process.pid),
    )


def _is_traced(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    tracer = next(
        (line.split()[1] for line in text.splitlines() if line.startswith("TracerPid:")), "0"
    )
    return tracer not in ("0", str(os.getpid()))
