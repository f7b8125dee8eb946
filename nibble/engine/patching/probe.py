"""A probe: a row of docs/patches.md and a program that shows whether a tree has the defect.

A probe file lies in patches/probes/, names its row (`ROW`) and has `probe(tree)`. Where nibble's
answer is something else than a patch (a flag, a rule, a plugin, an environment variable, a check at
build), it has `remedy(tree)` too, which shows the same scenario with nibble's fix in effect.
Each runs in a separate process (nibble.engine.patching.run), so that it may change any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["defect", "sound", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """What a probe saw, with the numbers or names that show it."""

    state: State
    detail: str


def defect(detail: str) -> Finding:
    """The defect is there."""
    return Finding("defect", detail)


def sound(detail: str) -> Finding:
    """The defect is not there."""
    return Finding("sound", detail)


def not_applicable(detail: str) -> Finding:
    """The question makes no sense for this tree: a file, a compiler or a package is not there."""
    return Finding("not applicable", detail)


@dataclass(frozen=True)
class Fix:
    """What nibble does about a row.

    kind   patch: `at` is PROJECT/NAME of a file in patches/; the others are outside vLLM's tree:
           flag: a vLLM flag in targets/ or recipes/; rule: an entry of rules/; environment: a
           variable nibble sets;
           plugin: a function of nibble's vLLM plugin; check: a refusal at build or start.
    at     where it is, as a reader finds it
    """

    kind: Literal["patch", "flag", "rule", "environment", "plugin", "check"]
    at: str


@dataclass(frozen=True)
class Row:
    """One row of docs/patches.md."""

    # 1 to 18 and names of files: patches of older projects; N1 to N28: defects of vLLM 0.32.0
    id: str
    title: str  # the defect (or the claim), one line
    how: str  # fake CUDA, AST, source scan, nvcc, fat binary, numeric, CMake: what the probe does
    expect: Mapping[str, State]  # release of vLLM -> what the probe finds in the pristine package
    verdict: str  # what is true about it, in one or two sentences
    instead: str  # what nibble does, in one sentence
    fix: Fix | None = None
    references: tuple[str, ...] = field(default=())
