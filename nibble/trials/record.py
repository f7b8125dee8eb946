"""Results of trials in nibble's cache: one file for each GPU, driver and build.

An entry that cannot be read is dropped with one line, and measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from nibble.trials.report import Place
from nibble.trials.trial import Outcome

FOLDER = "trials"
FORMAT = 1
Say = Callable[[str], None]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class ShapeTimes:
    """Microseconds of one product with a shape: rows -> time, for nibble's kernel and for vLLM's,
    whose class is `vllm_kernel`.
    """

    nibble: Mapping[str, float] = field(default_factory=dict)
    vllm: Mapping[str, float] = field(default_factory=dict)
    vllm_kernel: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShapeTimes:
        """Raises ValueError, TypeError or KeyError for other data."""
        nibble, vllm = (
            {str(int(rows)): float(time) for rows, time in data[name].items()}
            for name in ("nibble", "vllm")
        )
        if not all(0 < time < float("inf") for time in (*nibble.values(), *vllm.values())):
            raise ValueError("a time that is not positive")
        return cls(nibble, vllm, str(data["vllm_kernel"]))


@dataclass(frozen=True)
class Record:
    """The results for one place. `outcomes` are the latest of each trial, `shapes` the times of
    linear layers by the names of shapes.
    """

    place: Place
    path: Path | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    shapes: Mapping[str, ShapeTimes] = field(default_factory=dict)

    def with_outcomes(self, outcomes: Iterable[Outcome]) -> Record:
        """With newer outcomes. One that did not run changes no other verdict."""
        newer = {
            outcome.name: outcome
            for outcome in outcomes
            if outcome.verdict != "not run" or outcome.name not in self.outcomes
        }
        return replace(self, outcomes={**self.outcomes, **newer})

    def with_shapes(self, shapes: Mapping[str, ShapeTimes]) -> Record:
        return replace(self, shapes={**self.shapes, **shapes})

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "place": asdict(self.place),
            "outcomes": {name: outcome.to_json() for name, outcome in self.outcomes.items()},
            "shapes": {name: asdict(times) for name, times in self.shapes.items()},
        }

    def save(self, say: Say) -> None:
        """Write the file atomically; a cache that cannot be written is a warning."""
        if self.path is None:
            return
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            scratch.replace(self.path)
        except OSError as error:
            say(f"warning: results of trials are not kept: {self.path} ({error.strerror})")


def record_path(cache: Path, place: Place) -> Path:
    return cache / FOLDER / f"{place.key}.json"


def open_record(cache: Path, place: Place, say: Say) -> Record:
    """What is known of a place. `say` gets one line for each entry that is dropped."""
    path = record_path(cache, place)
    empty = Record(place, path)
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or Place(**data["place"]).key != place.key:
            raise ValueError("another format or machine")
        outcomes, shapes = dict(data["outcomes"]), dict(data["shapes"])
    except FileNotFoundError:
        return empty
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        say(f"dropped {path}: {_why(error)}; trials run again")
        return empty
    return replace(
        empty,
        outcomes=_readable(outcomes, Outcome.from_json, path, say),
        shapes=_readable(shapes, ShapeTimes.from_json, path, say),
    )


def _readable(
    entries: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Entry], path: Path, say: Say
) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for name, data in entries.items():
        try:
            found[name] = read(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            say(f"dropped the entry {name} of {path}: {_why(error)}; it is measured again")
    return found


def _why(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:120]
