"""A value with its layer, source and reason, and the one place that decides which of several wins.

Precedence: command line > VLLM_EXTRA_ARGS > environment > user TOML > known risk (rules/) > recipe
> target > nibble > vLLM. JSON objects are merged key by key. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nibble.engine.flags import merge

OURS = "nibble's default"
Outcome = Literal["wins", "merged", "overruled"]


class Layer(IntEnum):
    """Who sets a value; the higher layer wins."""

    VLLM = 0
    NIBBLE = 1
    TARGET = 2
    RECIPE = 3
    RULE = 4
    FILE = 5
    ENVIRONMENT = 6
    EXTRA_ARGS = 7
    COMMAND_LINE = 8
    LIMIT = 9  # what must hold whatever is set: a folder on this disk, memory that is free


@dataclass(frozen=True)
class Choice:
    """A value, where it came from (`environment PORT`, `recipe …`, `target gb10`) and why it is
    so.
    """

    value: Any
    source: str
    reason: str = ""
    layer: Layer = Layer.NIBBLE

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        value = str(self.value) if isinstance(self.value, Path) else self.value
        return {"value": value, "source": self.source, "reason": self.reason}


Choices = dict[str, Choice]


def values_of(choices: Mapping[str, Choice]) -> dict[str, Any]:
    """What was chosen, without the reasons."""
    return {name: choice.value for name, choice in choices.items()}


def at(layer: Layer, choices: Mapping[str, Choice]) -> Choices:
    """`choices` as those of `layer`."""
    return {name: replace(choice, layer=layer) for name, choice in choices.items()}


@dataclass(frozen=True)
class Flags(Mapping[str, Choice]):
    """Name -> the winning choice; `said` keeps all of them, the lowest layer first."""

    said: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)

    def add(self, choices: Mapping[str, Choice]) -> Flags:
        """With `choices` too. Of two with one layer the later wins."""
        said = dict(self.said)
        for name, choice in choices.items():
            said[name] = tuple(sorted((*said.get(name, ()), choice), key=lambda one: one.layer))
        return Flags(said)

    @cached_property
    def _winners(self) -> dict[str, Choice]:
        return {name: _joined(choices) for name, choices in self.said.items()}

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The winning values."""
        return values_of(self._winners)

    def __getitem__(self, name: str) -> Choice:
        return self._winners[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.said)

    def __len__(self) -> int:
        return len(self.said)

    def origin(self, name: str, *keys: str) -> Choice | None:
        """The highest choice that sets `name`, or the nested key of its JSON object."""
        for choice in reversed(self.said.get(name, ())):
            value = choice.value
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return choice
        return None

    def history(self, name: str) -> tuple[tuple[Choice, Outcome], ...]:
        """Every choice for `name`, the winning one first, and what became of it."""
        found: list[tuple[Choice, Outcome]] = []
        is_over = False
        for choice in reversed(self.said.get(name, ())):
            outcome: Outcome = "wins" if not found else "overruled" if is_over else "merged"
            is_object = isinstance(choice.value, Mapping)
            if outcome == "merged" and not is_object:
                outcome = "overruled"
            is_over = is_over or not is_object
            found.append((choice, outcome))
        return tuple(found)


def _joined(choices: tuple[Choice, ...]) -> Choice:
    first, *others = choices
    for choice in others:
        first = _over(first, choice)
    return first


def _over(low: Choice, high: Choice) -> Choice:
    if not isinstance(low.value, Mapping) or not isinstance(high.value, Mapping):
        return high
    return Choice(
        merge(low.value, high.value),
        " + ".join(dict.fromkeys([*low.source.split(" + "), *high.source.split(" + ")])),
        "; ".join(dict.fromkeys(one.reason for one in (low, high) if one.reason)),
        high.layer,
    )
