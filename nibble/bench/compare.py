"""Compares two results, and two servers in one result. Pure.

A figure changed where its medians differ by more than the noise: SAFETY times the largest of its
spreads in both results and of that figure's median spread over all cells, at least NOISE_FLOOR.
With six cells of three independent normal rounds, at most 3 of 100 comparisons of a server with
itself find a regression (tests/unit/test_bench.py simulates it).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nibble.bench.result import FIGURES, Measured
from nibble.bench.sweep import Cell
from nibble.errors import ExitCode, NibbleError

SAFETY = 1.5
NOISE_FLOOR = 0.05  # two starts of one server differ by a few percent
FEWEST_ROUNDS = 3  # fewer say nothing about noise
JUDGED = ("tokens_per_s", "ttft_ms", "per_token_ms")  # a p99 of few requests is one request's time
Verdict = Literal["better", "worse", "same"]


@dataclass(frozen=True)
class Change:
    """One figure of one cell. `gain` is the relative change, above 0 for the better."""

    cell: Cell
    figure: str
    old: float
    new: float
    gain: float
    noise: float

    @property
    def verdict(self) -> Verdict:
        """A loss is at most 1 and noise has no limit, so a figure that is (1 + noise)² times worse
        has changed too. Up to noise of 0.6 that is more than the noise.
        """
        if self.gain > 0:
            return "better" if self.gain > self.noise else "same"
        limit = min(self.noise, 1 - (1 + self.noise) ** -2)
        return "worse" if -self.gain > limit else "same"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "verdict": self.verdict}


def compare(old: Sequence[Measured], new: Sequence[Measured]) -> tuple[Change, ...]:
    """Changes of every cell that both have."""
    before = {one.cell: one for one in old}
    pairs = [(before[one.cell], one) for one in new if one.cell in before]
    spreads = {name: [one.spread(name) for pair in pairs for one in pair] for name in JUDGED}
    return tuple(
        _change(*pair, name, statistics.median(spreads[name])) for pair in pairs for name in JUDGED
    )


def refuse_too_little(old: Sequence[Measured], cells: Sequence[Cell], rounds: int) -> None:
    """Raises CONFIG where the sweep `cells` shares no cell with the old result, or where either has
    too few rounds.
    """
    shared = [one for one in old if one.cell in cells]
    if not shared:
        raise NibbleError(
            ExitCode.CONFIG,
            what="the result to compare with has none of this sweep's cells",
            expected=", ".join(str(one.cell) for one in old[:4]) or "a cell",
            action="measure the same prompts, outputs and concurrency",
        )
    fewest = min(rounds, *(len(one.rounds) for one in shared))
    if fewest < FEWEST_ROUNDS:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"results of {fewest} rounds do not show how much they differ by chance",
            expected=f"{FEWEST_ROUNDS} rounds or more in both",
            action=f"measure with --rounds {FEWEST_ROUNDS}",
        )


def _change(old: Measured, new: Measured, figure: str, usual: float) -> Change:
    before, after = old.median(figure), new.median(figure)
    if FIGURES[figure]:
        gain = after / before - 1 if before else 0.0
    else:
        gain = before / after - 1 if after else 0.0
    noise = max(SAFETY * max(old.spread(figure), new.spread(figure), usual), NOISE_FLOOR)
    return Change(new.cell, figure, before, after, gain, noise)


@dataclass(frozen=True)
class Ratio:
    """How many times one side is as fast as the other in a cell; above 1 means faster.

    `lowest` and `highest` are of the rounds, which took turns.
    """

    cell: Cell
    figure: str
    median: float
    lowest: float
    highest: float


def ratios(measured: Sequence[Measured], side: str, other: str) -> tuple[Ratio, ...]:
    """`side` beside `other`, round by round, of every cell that both have."""
    theirs = {one.cell: one for one in measured if one.side == other}
    return tuple(
        ratio
        for one in measured
        if one.side == side and one.cell in theirs
        for name in JUDGED
        if (ratio := _ratio(one, theirs[one.cell], name)) is not None
    )


def _ratio(ours: Measured, theirs: Measured, figure: str) -> Ratio | None:
    found = []
    for one, other in zip(ours.rounds, theirs.rounds, strict=False):
        up, down = getattr(one, figure), getattr(other, figure)
        if up and down:
            found.append(up / down if FIGURES[figure] else down / up)
    if not found:
        return None
    return Ratio(ours.cell, figure, statistics.median(found), min(found), max(found))


def refuse_others(old: Mapping[str, Any], model: Mapping[str, Any], machine: Any) -> None:
    """Raises CONFIG where the old result is about another model or machine."""
    for part, now, names in (
        ("model", model, ("id", "fingerprint")),
        ("machine", machine, ("cpu", "cores", "gpus", "remote")),
    ):
        before = old[part]
        differing = [name for name in names if before.get(name) != now.get(name)]
        if differing:
            name = differing[0]
            raise NibbleError(
                ExitCode.CONFIG,
                what=(
                    f"the result to compare with is of another {part}: its {name} is"
                    f" {before.get(name)}, here it is {now.get(name)}"
                ),
                expected=f"a result of the same {part}",
                action="name another file with --compare",
            )
