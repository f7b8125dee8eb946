"""The types of probes: a probe is a program that shows whether a tree of vLLM has a defect.

A probe is a file in patches/probes/ with a row of docs/patches.md (`ROW`) and a function
`probe(tree)`. If nibble's fix is not a patch (but a flag, a rule, a plugin, an environment variable
or a check at build), it also has `remedy(tree)`, which runs the same scenario with the fix in
effect. Each probe runs in a separate process (run.py), so it may change any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["defect", "sound", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """The result of a probe. `detail`: the numbers or names that show it."""

    state: State
    detail: str


def defect(detail: str) -> Finding:
    """The tree has the defect."""
    return Finding("defect", detail)


def sound(detail: str) -> Finding:
    """The tree does not have the defect."""
    return Finding("sound", detail)


def not_applicable(detail: str) -> Finding:
    """The probe cannot run on this tree: a file, a compiler or a package is missing."""
    return Finding("not applicable", detail)


@dataclass(frozen=True)
class Fix:
    """nibble's fix for a row.

    kind   patch: `at` is PROJECT/NAME of a file in patches/; the others are outside vLLM's tree:
           flag: a vLLM flag in targets/ or recipes/; rule: an entry of rules/; environment: a
           variable nibble sets;
           plugin: a function of nibble's vLLM plugin; check: a refusal at build or start.
    at     the location of the fix, for a reader
    """

    kind: Literal["patch", "flag", "rule", "environment", "plugin", "check"]
    at: str


@dataclass(frozen=True)
class Row:
    """A row of docs/patches.md."""

    # 1 to 18 and file names: patches of older projects; N1 to N28: defects of vLLM 0.32.0.
    id: str
    title: str  # the defect (or the claim), one line
    how: str  # the probe's method: fake CUDA, AST, source scan, nvcc, fat binary, numeric, CMake
    expect: Mapping[str, State]  # release of vLLM -> the probe's result in the unpatched package
    verdict: str  # whether the claim is true, in one or two sentences
    instead: str  # nibble's fix, in one sentence
    fix: Fix | None = None
    references: tuple[str, ...] = field(default=())
