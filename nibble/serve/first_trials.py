"""Tries the kernels of a plan's linear layers and experts before the first start on a GPU, driver
and build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from nibble.machine.gpu_users import gpu_uses
from nibble.plan.part_kernels import PartKernels
from nibble.plan.plan import Plan
from nibble.trials.catalog import vllm_kernels
from nibble.trials.choose import Part, vllm_fault
from nibble.trials.findings import not_idle
from nibble.trials.place import place_of
from nibble.trials.record import Record, open_record
from nibble.trials.run import run_trials
from nibble.trials.trial import Trial
from nibble.trials.tune import WORK_S, Wanted, missing, tune, tune_trials

Say = Callable[[str], None]


def should_try(plan: Plan, cache: Path, say: Say) -> Record | None:
    """The record to complete, or None: the plan has no such kernel, or its results are known."""
    settings, parts = plan.settings, _parts(plan)
    if settings.trials == "off" or not parts or plan.hardware.assumed:
        return None
    if settings.trials == "auto" and shipped_result(plan):
        return None
    record = open_record(cache, place_of(plan.target, plan.hardware), say)
    return record if any(_is_open(part, found, record) for part, found in parts.items()) else None


def _parts(plan: Plan) -> dict[Part, PartKernels]:
    """The kinds of layers that have kernels to try."""
    found = (plan.linear_kernels, plan.e4m3_kernels, plan.expert_kernels)
    return {kernels.part: kernels for kernels in found if kernels.uses}


def _is_open(part: Part, kernels: PartKernels, record: Record) -> bool:
    """Whether a verdict or a time is missing. Where a kernel has a fault, no time is."""
    names = {part.vllm_choice(use.form) for use in kernels.uses}
    names |= {part.ours} if kernels.tries_ours else set()
    untimed = missing(kernels.uses, record) if kernels.is_timed else ()
    fault = any(record.outcomes[name].is_fault for name in names if name in record.outcomes)
    return not names <= record.outcomes.keys() or bool(untimed and not fault)


def shipped_result(plan: Plan) -> str:
    """The file of nibble's own measurements on this kind of GPU, or nothing."""
    models = {plan.target.gpu_model(gpu.name) for gpu in plan.hardware.gpus}
    files = {model.trials if model else "" for model in models}
    return next(iter(files)) if len(files) == 1 else ""


def try_kernels(plan: Plan, record: Record, environ: Mapping[str, str], say: Say) -> None:
    """Run the trials and keep their results. A kernel with a fault is named."""
    parts = {part: found for part, found in _parts(plan).items() if _is_open(part, found, record)}
    ours = any(kernels.tries_ours for kernels in parts.values())
    kernels = "nibble's and vLLM's kernels" if ours else "vLLM's kernel"
    names = {"experts": "experts", "e4m3": "FP8 linear layers"}
    layers = " and ".join(names.get(part.task, "linear layers") for part in parts)
    say(
        f"trying {kernels} for {layers} on this GPU, once for this driver and build, for"
        f" {WORK_S:.0f} s at most after their processes have started"
    )
    child = plan.vllm_environ(environ)
    busy = not_idle(gpu_uses(gpu.index for gpu in plan.hardware.gpus))
    if busy and any(kernels.is_timed for kernels in parts.values()):
        say(f"{busy[0].what}: a start on an idle GPU measures times")
    wanted = [
        Wanted(
            missing(kernels.uses, record) or kernels.uses,
            part,
            kernels.tries_ours,
            kernels.is_timed and not busy,
        )
        for part, kernels in parts.items()
    ]
    kept, outcomes = tune(wanted, record, child)
    for each in wanted:
        is_linear = each.part.task == "linear"
        if is_linear and not each.with_ours and vllm_fault(kept, each.uses):
            others = run_trials(_others(plan, each), child, at_once=4, work_s=WORK_S)
            kept = kept.with_outcomes(others)
    for outcome in outcomes:
        if outcome.verdict != "right":
            say(outcome.line())
    kept.save(say)


def _others(plan: Plan, wanted: Wanted) -> list[Trial]:
    """vLLM's other linear kernels for this target, with the shapes of the plan."""
    uses = plan.linear_kernels.uses
    template = tune_trials(replace(wanted, uses=uses, with_ours=False, timed=False))[0]
    return [
        Trial(kernel, "linear", kernel, "cuda", template.shapes, template.rows)
        for kernel in vllm_kernels(plan.target)
        if not kernel.startswith("vllm:auto")
    ]
