"""Tries nibble's linear kernel and vLLM's on the shapes of a model: truth first, then time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nibble.trials.catalog import OURS
from nibble.trials.choose import (
    TIMED_ROWS,
    TRUTH_ROWS,
    Form,
    Use,
    times_of,
    vllm_choice,
)
from nibble.trials.record import Record
from nibble.trials.run import run_trials
from nibble.trials.trial import Fault, Outcome, Trial, planted

WORK_S = 15.0  # of each process after its start; they run side by side
TUNED_ROWS_OF_A_CPU = (1, 16)


def missing(uses: Sequence[Use], record: Record) -> tuple[Use, ...]:
    """The shapes without times in the record."""
    return tuple(use for use in uses if use.key not in record.shapes)


def tune_trials(
    uses: Sequence[Use], with_ours: bool = True, device: str = "cuda", timed: bool = True
) -> tuple[Trial, ...]:
    """nibble's operator, and vLLM's choice for each format of activations among `uses`."""
    rows = (TIMED_ROWS if device == "cuda" else TUNED_ROWS_OF_A_CPU) if timed else ()
    shapes = {OURS: [use.shape for use in uses]} if with_ours else {}
    for use in uses:
        shapes.setdefault(vllm_choice(use.form), []).append(use.shape)
    return tuple(
        Trial(kernel, "linear", kernel, device, tuple(dict.fromkeys(its)), TRUTH_ROWS, rows)
        for kernel, its in shapes.items()
    )


def tune(
    uses: Sequence[Use],
    record: Record,
    environ: Mapping[str, str],
    *,
    with_ours: bool = True,
    device: str = "cuda",
    work_s: float = WORK_S,
    faults: Mapping[str, Fault] | None = None,
    timed: bool = True,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[Record, list[Outcome]]:
    """The record with the outcomes, and with the times of shapes that both kernels have.

    A kernel whose time was over keeps the verdict it had; its times count all the same.
    """
    trials = planted(tune_trials(uses, with_ours, device, timed), faults or {})
    outcomes = run_trials(trials, environ, at_once=len(trials), work_s=work_s, on_done=on_done)
    by_name = {outcome.name: outcome for outcome in outcomes}
    theirs: dict[Form, Outcome] = {
        use.form: by_name[vllm_choice(use.form)]
        for use in uses
        if not by_name[vllm_choice(use.form)].is_fault
    }
    kept = record.with_outcomes(outcomes)
    ours = by_name.get(OURS)
    if ours is None or ours.is_fault or not timed:
        return kept, outcomes
    return kept.with_shapes(times_of(uses, ours, theirs)), outcomes
