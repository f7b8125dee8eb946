"""Decides whether vLLM hangs or only takes long. Pure: observations of its processes in, stalls
out.

Only time in which the supervisor ran counts: at most MAX_GAP_S between two observations. A
suspended machine, a paused container and a machine that swaps so much that the supervisor waits too
add nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import psutil

from nibble.engine.contract.pulse import CALL, IDLE, STEP
from nibble.engine.pulse import Pulse

MAX_GAP_S = 10.0
# A batch adds time at this rate: 8,192 tokens add 82 s. Prefill was slower only on CPUs, where CPU
# time counts.
PREFILL_TOKENS_PER_S = 100.0
# Known slow work (a compilation, swapping, a call such as a LoRA's load) may take ten times the
# limit.
EXCUSED_FACTOR = 10.0
BUSY_SHARE = 0.1  # of one CPU core
_COMPILERS = frozenset((
    "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "ninja", "cmake",
    "cc1", "cc1plus", "gcc", "g++", "c++", "cc", "clang", "clang++", "ld", "ld.lld", "as",
    "collect2",
))  # fmt: skip
# Files whose frames only a compilation has: a compiled graph and a kernel's launch run through
# others of these packages.
_COMPILING = re.compile(
    r"/(?:torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph)\.py"
    r"|torch/_inductor/(?:graph|scheduler|codecache|async_compile|select_algorithm)\.py"
    r"|triton/(?:compiler/|backends/\w+/compiler\.py|runtime/(?:build|autotuner)\.py)"
    r"|flashinfer/jit/|cutlass/base_dsl/|deep_gemm/jit)"
)

Kind = Literal["stopped", "api", "step", "untaken"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One process of vLLM's: its title, its state in psutil's words, CPU seconds and major page
    faults so far.
    """

    pid: int
    title: str
    state: str
    is_traced: bool
    cpu_s: float
    major_faults: int

    @property
    def name(self) -> str:
        return f"{self.title} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Look:
    """The processes at one moment (seconds of the monotonic clock).

    `answers` counts the API server's answers to the supervisor, None before the first request;
    `programs` are the names of all processes below the API server.
    """

    at_s: float
    processes: tuple[Seen, ...]
    pulses: tuple[Pulse, ...]
    answers: int | None
    programs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Stall:
    """A process that did not move for `waited_s`, which is at least `limit_s`."""

    kind: Kind
    pid: int
    waited_s: float
    limit_s: float
    what: str


class Stalls:
    """Measures how long each process has not moved. Call `feed` with looks in order."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = self.stopped_limit_s = limit_s
        self._last: Look | None = None
        self._waited: dict[tuple[Kind, int], float] = {}

    @property
    def longest_s(self) -> float:
        """The longest time without progress of a process now."""
        return max(self._waited.values(), default=0.0)

    def feed(self, look: Look) -> list[Stall]:
        """The stalls, a stopped process first."""
        last, self._last = self._last, look
        if last is None or any(one.is_traced for one in look.processes):
            return []  # a debugger stops processes: no time counts
        gap_s = min(max(look.at_s - last.at_s, 0.0), MAX_GAP_S)
        unmoved = list(_unmoved(look, last))
        self._waited = {key: self._waited.get(key, 0.0) + gap_s for key, _, _ in unmoved}
        found = []
        for key, what, more_s in unmoved:
            of_kind_s = self.stopped_limit_s if key[0] == "stopped" else self._limit_s
            waited_s, limit_s = self._waited[key], of_kind_s + more_s
            if waited_s >= limit_s:
                found.append(Stall(key[0], key[1], waited_s, limit_s, what))
        return found

    def forget(self, stall: Stall) -> None:
        """Restart all measurements: the engine did not stall."""
        self._waited.pop((stall.kind, stall.pid), None)


def _unmoved(look: Look, last: Look) -> Iterable[tuple[tuple[Kind, int], str, float]]:
    """(which, what, seconds beyond the limit) of each process that did not move since `last`."""
    names = {one.pid: one.name for one in look.processes}
    for one in look.processes:
        if one.state == psutil.STATUS_STOPPED:
            yield ("stopped", one.pid), f"{one.name} is stopped (state T)", 0.0
    engines = [pulse for pulse in look.pulses if pulse.kind == "engine"]
    before = {(pulse.kind, pulse.pid): pulse for pulse in last.pulses}
    still = [one for one in look.pulses if _has_same_turns(one, before.get((one.kind, one.pid)))]
    for one in engines:
        if one.doing != IDLE and not one.is_paused and one in still:
            name = names.get(one.pid, f"VLLM::EngineCore (pid {one.pid})")
            doing = f"a step with {one.tokens} token(s)" if one.doing == STEP else "a call"
            yield (
                ("step", one.pid),
                f"{name} has not finished {doing}",
                one.tokens / PREFILL_TOKENS_PER_S,
            )
    waiting = sum(pulse.requests for pulse in look.pulses if pulse.kind == "api")
    idle = engines and all(one.doing == IDLE and not one.is_paused for one in engines)
    if waiting and idle and len(still) == len(look.pulses):
        yield ("untaken", 0), f"the engine has not started {waiting} waiting request(s)", 0.0
    if look.answers is not None and look.answers == last.answers:
        yield ("api", 0), "the API server does not answer", 0.0


def _has_same_turns(pulse: Pulse, before: Pulse | None) -> bool:
    return before is not None and before.turns == pulse.turns and before.doing == pulse.doing


def excuse(
    stall: Stall,
    look: Look,
    last: Look,
    on_cpu: bool,
    stacks: str = "",
    has_other_machines: bool = False,
) -> str:
    """Why a stall does not count as a hang, or "".

    `on_cpu`: the model computes on the CPU, so that CPU time is progress. A GPU's host thread spins
    while it waits.
    """
    if stall.kind == "stopped" or stall.waited_s >= EXCUSED_FACTOR * stall.limit_s:
        return ""
    earlier = {one.pid: one for one in last.processes}
    grown = [(one, earlier[one.pid]) for one in look.processes if one.pid in earlier]
    gap_s = max(look.at_s - last.at_s, 1e-3)
    grown = _computing(grown, stall.kind)
    busy = sum(one.cpu_s - before.cpu_s for one, before in grown) / gap_s >= BUSY_SHARE
    if busy and (on_cpu or stall.kind == "api"):
        return "it uses CPU time"
    if sum(one.major_faults - before.major_faults for one, before in grown) > 0:
        return "the kernel reads its memory back from disk"
    if compilers := sorted(look.programs & _COMPILERS):
        return f"{compilers[0]} runs"
    if _COMPILING.search(stacks):
        return "it compiles"
    calls = any(pulse.pid == stall.pid and pulse.doing == CALL for pulse in look.pulses)
    if calls:
        return "it runs a call"
    # This machine cannot see what a rank on another one computes or compiles; that node reports a
    # lost rank.
    return "other machines take part" if has_other_machines and stall.kind == "step" else ""


def _computing(grown: list[tuple[Seen, Seen]], kind: Kind) -> list[tuple[Seen, Seen]]:
    """The processes whose CPU time counts: the workers, since an engine core that waits for them
    spins; without workers, the engine cores.
    """
    workers = [pair for pair in grown if "Worker" in pair[0].title]
    cores = [pair for pair in grown if "EngineCore" in pair[0].title]
    if kind == "api":
        return [pair for pair in grown if pair not in workers and pair not in cores]
    return workers or cores
