"""Which kernel each shape of a model gets, from the trials of this machine. Pure.

A layer has one kernel for every number of rows: nibble's kernels and vLLM's read different layouts,
and a second copy of the weights would take the memory of the KV cache. So the times of all buckets
of rows count together. Inside nibble's operator the rows choose among its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nibble.trials.catalog import (
    OUR_E4M3,
    OUR_EXPERTS,
    OUR_FP4_EXPERTS,
    OUR_FP4_PARTS,
    OUR_PARTS,
    OURS,
    OURS_FP4,
    THEIR_E4M3,
)
from nibble.trials.record import Record, ShapeTimes
from nibble.trials.trial import Outcome, Shape, Task, shape_name

Kernel = Literal["nibble", "vllm"]
# The activations of a checkpoint's NVFP4 layers; or an FP8 weight with a scale for all of it, for
# each row, or for 128 x 128 blocks.
Form = Literal["bf16", "fp4", "fp8", "fp8-channel", "fp8-block"]
E4M3_FORMS: tuple[Form, ...] = ("fp8", "fp8-channel", "fp8-block")
# Rows of decode steps by their number of sequences, and of a prompt.
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_ROWS = 2048
TIMED_ROWS = (*DECODE_ROWS, PROMPT_ROWS)
TRUTH_ROWS = (1, 16, 17, 64, 200, 1100)
UNMEASURED = "not measured here"


@dataclass(frozen=True)
class Part:
    """A kind of layers. `ours`: the trial of nibble's operator for them; `checks`: other trials
    whose fault is the operator's; `theirs`: the beginning of the name of vLLM's trial. `together`:
    all layers of a model have one kernel.
    """

    task: Task
    ours: str
    checks: tuple[str, ...]
    theirs: str
    truth_rows: tuple[int, ...]
    timed_rows: tuple[int, ...] = TIMED_ROWS
    together: bool = False

    def vllm_choice(self, form: Form) -> str:
        """The trial of vLLM's own choice."""
        return f"{self.theirs}:{form}"


LINEAR = Part("linear", OURS, (*OUR_PARTS, "conversions"), "vllm:auto", TRUTH_ROWS)
# Fewer: the right sum of many experts in float64 takes longer than a kernel's.
EXPERTS = Part("experts", OUR_EXPERTS, ("conversions",), "vllm:experts", (1, 16, 200, 1100))
# The same layers where nibble's kernels multiply FP4 activations.
LINEAR_FP4 = replace(LINEAR, ours=OURS_FP4, checks=(*OUR_FP4_PARTS, "conversions"))
EXPERTS_FP4 = replace(EXPERTS, ours=OUR_FP4_EXPERTS, checks=("quantize", "conversions"))
# nibble's kernel for few rows, beside vLLM's for more.
E4M3 = Part("e4m3", OUR_E4M3, (), THEIR_E4M3, DECODE_ROWS[:4], DECODE_ROWS[:4], together=True)


@dataclass(frozen=True)
class Use:
    """A shape on one GPU, and how many layers have it."""

    shape: Shape
    layers: int
    form: Form = "bf16"

    @property
    def key(self) -> str:
        """Its name in a record: vLLM may take another kernel for other activations."""
        return f"{shape_name(self.shape)} {self.form}"


@dataclass(frozen=True)
class ShapeChoice:
    """The kernel of a shape and why. `ratio`: nibble's time / vLLM's in the mean."""

    use: Use
    kernel: Kernel
    why: str
    ratio: float | None = None
    times: ShapeTimes | None = None

    def to_json(self) -> dict[str, Any]:
        """For `nibble plan --json` and /status: both times in microseconds, for each bucket."""
        times = self.times or ShapeTimes()
        return {
            "shape": shape_name(self.use.shape),
            "layers": self.use.layers,
            "kernel": self.kernel,
            "why": self.why,
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "nibble_us": dict(times.nibble),
            "vllm_us": dict(times.vllm),
            "vllm_kernel": times.vllm_kernel,
        }


def choose(
    uses: Sequence[Use], record: Record, default: Kernel, most_rows: int, part: Part = LINEAR
) -> tuple[ShapeChoice, ...]:
    """One choice a shape. `default`: the kernel of a shape without times; `most_rows`: sequences
    of a decode step, so that buckets which this server cannot reach do not count.

    A kernel with a fault gets no layer, unless both have one: then `default` stays, and the
    server's own checks decide.
    """
    ours, theirs = our_fault(record, part), vllm_fault(record, uses, part)
    if ours and not theirs:
        return tuple(ShapeChoice(use, "vllm", ours.line()) for use in uses)
    if theirs and not ours and is_proven(record, part):
        return tuple(ShapeChoice(use, "nibble", f"vLLM's: {theirs.line()}") for use in uses)
    choices = tuple(_by_time(use, record, default, most_rows) for use in uses)
    if not part.together:
        return choices
    ratio = mean_ratio(times_together(choices), most_rows)
    if ratio is None:
        return tuple(replace(choice, kernel=default, why=UNMEASURED) for choice in choices)
    kernel: Kernel = "nibble" if ratio <= 1 else "vllm"
    why = "the faster here in the mean of all layers"
    return tuple(replace(choice, kernel=kernel, why=why) for choice in choices)


def _by_time(use: Use, record: Record, default: Kernel, most_rows: int) -> ShapeChoice:
    times = record.shapes.get(use.key)
    ratio = mean_ratio(times, most_rows) if times else None
    if ratio is None:
        return ShapeChoice(use, default, UNMEASURED, times=times)
    kernel: Kernel = "nibble" if ratio <= 1 else "vllm"
    return ShapeChoice(use, kernel, "the faster here in the mean", ratio, times)


def mean_ratio(times: ShapeTimes, most_rows: int) -> float | None:
    """The geometric mean of nibble's time / vLLM's over the buckets that both have: decode steps
    of up to `most_rows` rows, and a prompt as one more.
    """
    reached = [rows for rows in DECODE_ROWS if rows < 2 * max(1, most_rows)]
    logs = [
        math.log(times.nibble[str(rows)] / times.vllm[str(rows)])
        for rows in (*reached, PROMPT_ROWS)
        if str(rows) in times.nibble and str(rows) in times.vllm
    ]
    return math.exp(sum(logs) / len(logs)) if logs else None


def times_together(choices: Sequence[ShapeChoice]) -> ShapeTimes:
    """Microseconds of all layers that have times of both kernels, for the rows that all of these
    have.
    """
    timed = [
        (choice.times, choice.use.layers)
        for choice in choices
        if choice.times and choice.ratio is not None
    ]
    known = [times.nibble.keys() & times.vllm.keys() for times, _ in timed]
    rows = set.intersection(*map(set, known)) if known else set[str]()
    ordered = sorted(rows, key=int)
    return ShapeTimes(
        {row: sum(times.nibble[row] * layers for times, layers in timed) for row in ordered},
        {row: sum(times.vllm[row] * layers for times, layers in timed) for row in ordered},
    )


def our_fault(record: Record, part: Part = LINEAR) -> Outcome | None:
    """A fault of nibble's operator or of one of its kernels."""
    return _fault(record, (part.ours, *part.checks))


def vllm_fault(record: Record, uses: Iterable[Use], part: Part = LINEAR) -> Outcome | None:
    """A fault of the kernel that vLLM takes for these layers."""
    return _fault(record, dict.fromkeys(part.vllm_choice(use.form) for use in uses))


def is_proven(record: Record, part: Part = LINEAR) -> bool:
    """Whether nibble's operator was right on this machine, with this driver and this build."""
    found = record.outcomes.get(part.ours)
    return found is not None and found.verdict == "right" and our_fault(record, part) is None


def right_backend(record: Record, form: Form) -> str:
    """A --linear-backend of vLLM that was right here, for layers whose kernel by default was not;
    empty without one.
    """
    for wanted in (form, "bf16"):
        for name, outcome in record.outcomes.items():
            kind, _, rest = name.partition(":")
            backend, _, activations = rest.partition(":")
            is_named = kind == "vllm" and backend != "auto" and activations == wanted
            if is_named and outcome.verdict == "right":
                return backend
    return ""


def _fault(record: Record, names: Iterable[str]) -> Outcome | None:
    found = (record.outcomes.get(name) for name in names)
    return next((outcome for outcome in found if outcome and outcome.is_fault), None)


def times_of(
    uses: Sequence[Use], ours: Outcome, theirs: Mapping[Form, Outcome]
) -> dict[str, ShapeTimes]:
    """The times of two kernels by the keys of a record. A shape whose turn did not come has none,
    so that the next start does not wait for it again.
    """
    found: dict[str, ShapeTimes] = {}
    for use in uses:
        name, other = shape_name(use.shape), theirs.get(use.form)
        if other is not None:
            both = ours.times.get(name, {}), other.times.get(name, {})
            found[use.key] = ShapeTimes(*both, other.ran)
    return found


def summary(choices: Sequence[ShapeChoice]) -> str:
    """`nibble's for 3 of 4 shapes (0.55 to 0.81 of vLLM's time); vLLM's for 4096x14336 (1.08)`."""
    ours = [choice for choice in choices if choice.kernel == "nibble"]
    theirs = [choice for choice in choices if choice.kernel == "vllm"]
    parts: list[str] = []
    if ours:
        ratios = [choice.ratio for choice in ours if choice.ratio is not None]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f} of vLLM's time)" if ratios else ""
        parts.append(f"nibble's for {len(ours)} of {len(choices)} shapes{spread}")
    for choice in theirs:
        ratio = "" if choice.ratio is None else f" ({choice.ratio:.2f})"
        parts.append(f"vLLM's for {shape_name(choice.use.shape)}{ratio}")
    return "; ".join(parts)
