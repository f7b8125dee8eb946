"""A round's figures as vLLM's benchmark reports them, and a cell's over all rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nibble.bench.sweep import Cell
from nibble.errors import ExitCode, NibbleError
from nibble.printable import printable

MAX_REASONS, REASON_LENGTH = 3, 160
# Name of a figure -> whether more is better. What tables show and comparisons judge.
FIGURES: Mapping[str, bool] = {
    "tokens_per_s": True,
    "ttft_ms": False,
    "ttft_p99_ms": False,
    "per_token_ms": False,
    "between_p99_ms": False,
}
_FROM_VLLM = {
    "seconds": "duration",
    "requests_per_s": "request_throughput",
    "tokens_per_s": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "between_ms": "median_itl_ms",
    "between_p99_ms": "p99_itl_ms",
    "per_token_ms": "median_tpot_ms",
}


@dataclass(frozen=True)
class Round:
    """One run of one cell. Times are medians in ms unless a name says p99. `per_token_ms` is a
    request's time per token after the first; `between_ms` lies between two pieces of a stream, of
    which a busy client reads several at once.

    `errors` counts requests that failed or whose answer was shorter than asked. `joules`: of the
    GPUs, None without a counter.
    """

    seconds: float
    requests: int
    errors: int
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    between_ms: float
    between_p99_ms: float
    per_token_ms: float
    output_tokens: int
    joules: float | None = None
    reasons: tuple[str, ...] = field(default=())

    @property
    def joules_per_token(self) -> float | None:
        """Energy of an output token."""
        if self.joules is None or not self.output_tokens:
            return None
        return self.joules / self.output_tokens


def read_round(found: Mapping[str, Any], cell: Cell, joules: float | None) -> Round:
    """A round from the result of `vllm bench serve --save-detailed`. Raises INTERNAL where vLLM's
    format is another one.
    """
    try:
        lengths = [int(length or 0) for length in found["output_lens"]]
        short = sum(0 < length < cell.output_tokens for length in lengths)
        figures = {name: float(found[key]) for name, key in _FROM_VLLM.items()}
        failed, completed = int(found["failed"]), int(found["completed"])
        return Round(
            **figures,
            requests=failed + completed,
            errors=failed + short,
            output_tokens=int(found["total_output_tokens"]),
            joules=joules,
            reasons=_reasons(found["errors"], short),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NibbleError(
            ExitCode.INTERNAL,
            what=f"vLLM's benchmark wrote another result than 0.32.0 does ({error!r})",
            action="install the vLLM that this nibble pins",
        ) from None


def _reasons(errors: Sequence[str], short: int) -> tuple[str, ...]:
    """Different errors, the last line of each: vLLM keeps whole tracebacks."""
    lines = [error.strip().splitlines()[-1] for error in errors if error.strip()]
    found = [printable(line)[:REASON_LENGTH] for line in dict.fromkeys(lines)]
    found += [f"{short} answers shorter than asked"] if short else []
    return tuple(found[:MAX_REASONS])


@dataclass(frozen=True)
class Measured:
    """All rounds of one cell on one server, named `side`."""

    side: str
    cell: Cell
    rounds: tuple[Round, ...]

    def median(self, figure: str) -> float:
        """Of all rounds."""
        return statistics.median(getattr(one, figure) for one in self.rounds)

    def spread(self, figure: str) -> float:
        """(Largest - smallest) / median of the rounds; 0 for one round."""
        values = [getattr(one, figure) for one in self.rounds]
        middle = statistics.median(values)
        return (max(values) - min(values)) / middle if middle else 0.0

    @property
    def errors(self) -> int:
        return sum(one.errors for one in self.rounds)

    @property
    def requests(self) -> int:
        return sum(one.requests for one in self.rounds)

    @property
    def joules_per_token(self) -> float | None:
        """Median of the rounds that have it."""
        found = [value for one in self.rounds if (value := one.joules_per_token) is not None]
        return statistics.median(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `median` and `spread` are for readers, the rounds for programs."""
        return {
            "side": self.side,
            **self.cell.to_json(),
            "median": {name: round(self.median(name), 3) for name in FIGURES},
            "spread": {name: round(self.spread(name), 4) for name in FIGURES},
            "joules_per_token": self.joules_per_token,
            "errors": self.errors,
            "rounds": [asdict(one) for one in self.rounds],
        }


def measured_from_json(found: Mapping[str, Any]) -> Measured:
    """The opposite of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    cell = Cell(*(int(found[name]) for name in ("prompt_tokens", "output_tokens", "concurrency")))
    rounds = tuple(Round(**{**one, "reasons": tuple(one["reasons"])}) for one in found["rounds"])
    if not rounds or not all(
        isinstance(getattr(one, name), int | float) for one in rounds for name in FIGURES
    ):
        raise ValueError("a cell without figures")
    return Measured(str(found["side"]), cell, rounds)


def gather(rounds: Sequence[tuple[str, Cell, Round]], sides: Sequence[str]) -> tuple[Measured, ...]:
    """Rounds in any order -> cells in theirs, with `sides` in each."""
    found: dict[tuple[Cell, str], list[Round]] = {}
    for side, cell, one in rounds:
        found.setdefault((cell, side), []).append(one)
    order = sorted(found, key=lambda key: (key[0], sides.index(key[1])))
    return tuple(Measured(side, cell, tuple(found[cell, side])) for cell, side in order)
