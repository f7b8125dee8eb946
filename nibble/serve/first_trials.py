"""Tries the linear kernels of a plan before the first start on a GPU, driver and build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nibble.machine.gpu_users import gpu_uses
from nibble.plan.plan import Plan
from nibble.trials.catalog import OURS, vllm_kernels
from nibble.trials.choose import vllm_choice, vllm_fault
from nibble.trials.findings import not_idle
from nibble.trials.place import place_of
from nibble.trials.record import Record, open_record
from nibble.trials.run import run_trials
from nibble.trials.trial import Trial
from nibble.trials.tune import WORK_S, missing, tune, tune_trials

Say = Callable[[str], None]


def should_try(plan: Plan, cache: Path, say: Say) -> Record | None:
    """The record to complete, or None: the plan has no such kernel, or its results are known."""
    kernels, settings = plan.linear_kernels, plan.settings
    if settings.trials == "off" or not kernels.uses or plan.hardware.assumed:
        return None
    if settings.trials == "auto" and shipped_result(plan):
        return None
    record = open_record(cache, place_of(plan.target, plan.hardware), say)
    names = {vllm_choice(use.form) for use in kernels.uses}
    names |= {OURS} if kernels.tries_ours else set()
    untimed = missing(kernels.uses, record) if kernels.is_timed else ()
    # Where a kernel has a fault, no time is missing.
    fault = any(record.outcomes[name].is_fault for name in names if name in record.outcomes)
    if names <= record.outcomes.keys() and (fault or not untimed):
        return None
    return record


def shipped_result(plan: Plan) -> str:
    """The file of nibble's own measurements on this kind of GPU, or nothing."""
    models = {plan.target.gpu_model(gpu.name) for gpu in plan.hardware.gpus}
    files = {model.trials if model else "" for model in models}
    return next(iter(files)) if len(files) == 1 else ""


def try_kernels(plan: Plan, record: Record, environ: Mapping[str, str], say: Say) -> None:
    """Run the trials and keep their results. A kernel with a fault is named."""
    kernels = plan.linear_kernels
    ours = "nibble's and vLLM's linear kernels" if kernels.tries_ours else "vLLM's linear kernel"
    say(
        f"trying {ours} on this GPU, once for this driver and build, for {WORK_S:.0f} s at most"
        " after their processes have started"
    )
    child = plan.vllm_environ(environ)
    wanted = missing(kernels.uses, record) or kernels.uses
    busy = not_idle(gpu_uses(gpu.index for gpu in plan.hardware.gpus))
    if kernels.is_timed and busy:
        say(f"{busy[0].what}: a start on an idle GPU measures times")
    timed = kernels.is_timed and not busy
    kept, outcomes = tune(wanted, record, child, with_ours=kernels.tries_ours, timed=timed)
    if vllm_fault(kept, wanted) and not kernels.tries_ours:
        kept = kept.with_outcomes(run_trials(_others(plan), child, at_once=4, work_s=WORK_S))
    for outcome in outcomes:
        if outcome.verdict != "right":
            say(outcome.line())
    kept.save(say)


def _others(plan: Plan) -> list[Trial]:
    """vLLM's other kernels for this target, with the shapes of the plan."""
    template = tune_trials(plan.linear_kernels.uses, with_ours=False, timed=False)[0]
    return [
        Trial(kernel, "linear", kernel, "cuda", template.shapes, template.rows)
        for kernel in vllm_kernels(plan.target)
        if not kernel.startswith("vllm:auto")
    ]
