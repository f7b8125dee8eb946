"""A value with its layer, source and reason, and the rule that decides which of several wins.

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
    """The origin of a value; the higher layer wins."""

    VLLM = 0
    NIBBLE = 1
    TARGET = 2
    RECIPE = 3
    RULE = 4
    FILE = 5
    ENVIRONMENT = 6
    EXTRA_ARGS = 7
    COMMAND_LINE = 8
    LIMIT = 9  # facts that overrule every setting: a folder on this disk, free memory


@dataclass(frozen=True)
class Choice:
    """A value, its source (`environment PORT`, `recipe …`, `target gb10`) and its reason."""

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
    """Name -> value, without sources and reasons."""
    return {name: choice.value for name, choice in choices.items()}


def tensor_parallel_size(values: Mapping[str, Any]) -> int:
    """Over how many GPUs each layer is divided."""
    return int(values.get("--tensor-parallel-size") or 1)


def at(layer: Layer, choices: Mapping[str, Choice]) -> Choices:
    """`choices`, moved to `layer`."""
    return {name: replace(choice, layer=layer) for name, choice in choices.items()}


@dataclass(frozen=True)
class Flags(Mapping[str, Choice]):
    """Name -> the winning choice. `all_choices` keeps every choice, the lowest layer first."""

    all_choices: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)

    def add(self, choices: Mapping[str, Choice]) -> Flags:
        """These flags with `choices` added. Of two choices with the same layer the later one
        wins.
        """
        all_choices = dict(self.all_choices)
        for name, choice in choices.items():
            all_choices[name] = tuple(
                sorted((*all_choices.get(name, ()), choice), key=lambda known: known.layer)
            )
        return Flags(all_choices)

    @cached_property
    def _winners(self) -> dict[str, Choice]:
        return {name: _merge_all(choices) for name, choices in self.all_choices.items()}

    @cached_property
    def plain(self) -> dict[str, Any]:
        """Name -> the winning value."""
        return values_of(self._winners)

    def __getitem__(self, name: str) -> Choice:
        return self._winners[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_choices)

    def __len__(self) -> int:
        return len(self.all_choices)

    def origin(self, name: str, *keys: str) -> Choice | None:
        """The highest choice that sets `name`, or the nested key `keys` of its JSON object."""
        for choice in reversed(self.all_choices.get(name, ())):
            value = choice.value
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return choice
        return None

    def history(self, name: str) -> tuple[tuple[Choice, Outcome], ...]:
        """Every choice for `name` with its outcome, the winner first."""
        history: list[tuple[Choice, Outcome]] = []
        is_decided = False
        for choice in reversed(self.all_choices.get(name, ())):
            outcome: Outcome = "wins" if not history else "overruled" if is_decided else "merged"
            is_object = isinstance(choice.value, Mapping)
            if outcome == "merged" and not is_object:
                outcome = "overruled"
            is_decided = is_decided or not is_object
            history.append((choice, outcome))
        return tuple(history)


def _merge_all(choices: tuple[Choice, ...]) -> Choice:
    result, *others = choices
    for choice in others:
        result = _merge_pair(result, choice)
    return result


def _merge_pair(low: Choice, high: Choice) -> Choice:
    if not isinstance(low.value, Mapping) or not isinstance(high.value, Mapping):
        return high
    return Choice(
        merge(low.value, high.value),
        " + ".join(dict.fromkeys([*low.source.split(" + "), *high.source.split(" + ")])),
        "; ".join(dict.fromkeys(choice.reason for choice in (low, high) if choice.reason)),
        high.layer,
    )
