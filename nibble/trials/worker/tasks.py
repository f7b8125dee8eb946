"""Task of a trial -> function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from nibble.trials.trial import Task, Trial


class Teller:
    """What a task tells while it runs: its phase, and the times of a shape as soon as it has them.

    A process that ends early has told the phase that ended it.
    """

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        self._tell = tell

    def __call__(self, phase: str) -> None:
        self._tell("phase", phase)

    def times(self, shape: str, times: Mapping[str, float]) -> None:
        self._tell("times", {shape: times})


Run = Callable[[Trial, Teller], dict[str, Any]]


def _lazy(module: str) -> Run:
    """`run` of a module that is imported when it is called: a process needs one of them."""

    def run(trial: Trial, say: Teller) -> dict[str, Any]:
        return import_module(f"nibble.trials.worker.{module}").run(trial, say)

    return run


TASKS: Mapping[Task, Run] = {
    "conversions": _lazy("conversions"),
    "linear": _lazy("linear"),
    "experts": _lazy("experts"),
    "fp8": _lazy("fp8"),
    "e4m3": _lazy("e4m3"),
    "quantize": _lazy("quantize"),
    "head": _lazy("head"),
    "bandwidth": _lazy("bandwidth"),
    "links": _lazy("links"),
}
