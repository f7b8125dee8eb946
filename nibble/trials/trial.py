"""What a trial asks of its process, what the process answers, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

# Rows N and columns K of a weight. Of a layer of experts: experts, experts of a token, hidden and
# intermediate size, and 2 for gate and up or 1 for up alone.
Shape = tuple[int, ...]
Task = Literal[
    "conversions", "linear", "experts", "fp8", "e4m3", "quantize", "head", "bandwidth", "links"
]
Verdict = Literal["right", "wrong", "not finite", "hung", "crashed", "refused", "not run"]
# A kernel with one of these is not used. `refused` says that it is not for this machine, and
# `not run` that the time was over.
FAULTS: frozenset[Verdict] = frozenset({"wrong", "not finite", "hung", "crashed"})
Fault = Literal["hang", "wrong", "nan", "crash"]  # that a test plants
PLANTS: tuple[Fault, ...] = ("hang", "wrong", "nan", "crash")

# Seconds for each phase of a process. The first imports torch and vLLM, from a cold disk too; the
# second prepares a weight and makes the first call, which may compile; the last is one product.
START_S, PREPARE_S, RUN_S = 120.0, 60.0, 10.0
PHASE_LIMITS: Mapping[str, float] = {"start": START_S, "prepare": PREPARE_S, "run": RUN_S}


@dataclass(frozen=True)
class Trial:
    """One kernel in one process.

    `kernel` is a name of worker/kernels.py. `rows` are compared with float64 and `timed_rows` are
    timed, each for all `shapes`. `lock` is a file that a process holds while it measures time.
    """

    name: str
    task: Task
    kernel: str = ""
    device: str = "cpu"
    shapes: tuple[Shape, ...] = ()
    rows: tuple[int, ...] = ()
    timed_rows: tuple[int, ...] = ()
    lock: str = ""
    plant: Fault | None = None
    seconds_each: float = 0.1  # to time one shape with one number of rows

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        tuples = {name: tuple(data[name]) for name in ("rows", "timed_rows")}
        shapes = tuple(tuple(map(int, shape)) for shape in data["shapes"])
        return cls(**{**data, **tuples, "shapes": shapes})


Times = dict[str, dict[str, float]]  # shape such as "4096x4096" -> rows -> microseconds


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    `detail` is the reason of a verdict other than `right`. `error` is the largest |y - right| /
    |right| of a row, `ran` the class or the instructions that computed. `facts` are measurements.
    """

    name: str
    verdict: Verdict
    detail: str = ""
    error: float | None = None
    ran: str = ""
    times: Times = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.verdict in FAULTS

    def line(self) -> str:
        """`decode: wrong (4096x4096 with 16 rows: off by 0.31, at most 0.02)`."""
        return f"{self.name}: {self.verdict}" + (f" ({self.detail})" if self.detail else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Raises TypeError, KeyError or ValueError for other data."""
        found = cls(**data)
        if found.verdict not in {"right", "refused", "not run", *FAULTS}:
            raise ValueError(f"verdict {found.verdict!r}")
        for times in found.times.values():
            if not all(float(value) > 0 for value in times.values()):
                raise ValueError("a time that is not positive")
        return found


def shape_name(shape: Sequence[int]) -> str:
    """`4096x4096`, or `128x8x2048x768x2` for experts."""
    return "x".join(map(str, shape))


def ended_early(trial: Trial, phase: str, code: int | None, last_line: str) -> Outcome:
    """The outcome of a process that ended without a result (`code`), or at a limit (None)."""
    if code is None:
        limit = PHASE_LIMITS.get(phase.partition(":")[0], START_S)
        detail = f"{_doing(phase)} did not end within {limit:.0f} s"
        if phase == "start":  # Python and torch, not the kernel
            return Outcome(trial.name, "not run", detail)
        return Outcome(trial.name, "hung", detail)
    signal = f"signal {-code}" if code < 0 else f"exit {code}"
    why = f"{_doing(phase)} ended its process with {signal}"
    return Outcome(trial.name, "crashed", f"{why}: {last_line}" if last_line else why)


def out_of_time(trial: Trial) -> Outcome:
    """The outcome of a trial that the deadline of all trials ended."""
    return Outcome(trial.name, "not run", "no time was left")


def _doing(phase: str) -> str:
    kind, _, what = phase.partition(":")
    words = {"start": "starting Python", "prepare": "preparing", "run": "multiplying"}
    return " ".join(filter(None, (words.get(kind, kind), what)))


def planted(trials: Sequence[Trial], faults: Mapping[str, Fault]) -> tuple[Trial, ...]:
    """The trials, with a fault in the kernel of each trial that `faults` names."""
    return tuple(replace(trial, plant=faults.get(trial.name)) for trial in trials)
