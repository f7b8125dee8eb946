"""Tries nibble's kernels and vLLM's on the shapes of a model: truth first, then time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nibble.trials.choose import LINEAR, Form, Part, Use, times_of
from nibble.trials.record import Record
from nibble.trials.run import run_trials
from nibble.trials.trial import Fault, Outcome, Trial, planted

WORK_S = 15.0  # of each process after its start; they run side by side
TUNED_ROWS_OF_A_CPU = (1, 16)


@dataclass(frozen=True)
class Wanted:
    """Layers to try. `with_ours`: nibble's kernel too; `timed`: times, and not only truth."""

    uses: Sequence[Use]
    part: Part = LINEAR
    with_ours: bool = True
    timed: bool = True


def missing(uses: Sequence[Use], record: Record) -> tuple[Use, ...]:
    """The shapes without times in the record."""
    return tuple(use for use in uses if use.key not in record.shapes)


def tune_trials(wanted: Wanted, device: str = "cuda") -> tuple[Trial, ...]:
    """nibble's operator, and vLLM's choice for each format of activations among the uses."""
    part = wanted.part
    timed = part.timed_rows if device == "cuda" else TUNED_ROWS_OF_A_CPU
    rows = timed if wanted.timed else ()
    shapes = {part.ours: [use.shape for use in wanted.uses]} if wanted.with_ours else {}
    for use in wanted.uses:
        shapes.setdefault(part.vllm_choice(use.form), []).append(use.shape)
    return tuple(
        Trial(kernel, part.task, kernel, device, tuple(dict.fromkeys(its)), part.truth_rows, rows)
        for kernel, its in shapes.items()
    )


def tune(
    wanted: Sequence[Wanted],
    record: Record,
    environ: Mapping[str, str],
    *,
    device: str = "cuda",
    work_s: float = WORK_S,
    faults: Mapping[str, Fault] | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[Record, list[Outcome]]:
    """The record with the outcomes, and with the times of shapes that both kernels have.

    A kernel whose time was over keeps the verdict it had; its times count all the same.
    """
    trials = [trial for each in wanted for trial in tune_trials(each, device)]
    trials = planted(trials, faults or {})
    outcomes = run_trials(trials, environ, at_once=len(trials), work_s=work_s, on_done=on_done)
    by_name = {outcome.name: outcome for outcome in outcomes}
    kept = record.with_outcomes(outcomes)
    for each in wanted:
        ours = by_name.get(each.part.ours) if each.with_ours else None
        if ours is not None and not ours.is_fault and each.timed:
            theirs = _right(each, by_name)
            kept = kept.with_shapes(times_of(each.uses, ours, theirs))
    return kept, outcomes


def _right(wanted: Wanted, by_name: Mapping[str, Outcome]) -> dict[Form, Outcome]:
    """vLLM's kernels without a fault, by the format of activations."""
    found: dict[Form, Outcome] = {
        use.form: by_name[wanted.part.vllm_choice(use.form)] for use in wanted.uses
    }
    return {form: outcome for form, outcome in found.items() if not outcome.is_fault}
