"""What an evaluation must reach: options first, then the model's recipe, then nibble's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nibble.bench.quality.outcome import Outcome
from nibble.bench.quality.parity import Parity
from nibble.bench.quality.tasks import Score


@dataclass(frozen=True)
class Thresholds:
    """`max_kl` in nats, `min_top1` and `min_tools` as shares of 1, `min_score` of every task."""

    max_kl: float = 0.05
    min_top1: float = 0.95
    min_tools: float = 1.0
    min_score: float = 0.0


NAMES = tuple(one.name for one in fields(Thresholds))


def choose(given: Mapping[str, float | None], recipe: Mapping[str, Any]) -> Thresholds:
    """Each from the options, else from the recipe, else nibble's. Pure."""
    typed = {name: float(value) for name, value in given.items() if value is not None}
    known = {name: float(recipe[name]) for name in NAMES if name in recipe}
    return Thresholds(**{**known, **typed})


def failures(
    limits: Thresholds,
    parity: Parity | None,
    outcomes: Mapping[str, Sequence[Outcome]],
    scores: Sequence[Score],
) -> list[str]:
    """What misses its threshold, a line each. Pure."""
    found = []
    if parity is not None:
        if not parity.kl_nats <= limits.max_kl:
            found.append(f"KL {parity.kl_nats:.4f} nats, above {limits.max_kl}")
        if parity.top1 < limits.min_top1:
            found.append(f"top-1 {parity.top1:.3f}, below {limits.min_top1}")
    for part, cases in outcomes.items():
        passed = share(cases)
        # vLLM's parsers do not depend on the model: every script must pass
        wanted = limits.min_tools if part == "tools" else 1.0
        if passed < wanted:
            found.append(f"{part}: {passed:.3f} of the cases passed, below {wanted}")
    found += [
        f"{one.task}: {one.accuracy:.3f}, below {limits.min_score}"
        for one in scores
        if one.accuracy < limits.min_score
    ]
    return found


def share(cases: Sequence[Outcome]) -> float:
    """The share of cases that passed, of those that ran; 1 of none. Pure."""
    ran = [one for one in cases if not one.is_skipped]
    return sum(one.passed for one in ran) / len(ran) if ran else 1.0
