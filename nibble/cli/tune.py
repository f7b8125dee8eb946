"""`nibble tune`: times the kernels of linear layers and experts on a model's shapes, for later
plans and starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rich.markup import escape

from nibble.cli.common import say
from nibble.cli.selftest import faults_of
from nibble.cli.tables import plain_table, wide_console
from nibble.errors import ExitCode, NibbleError
from nibble.machine.gpu_users import gpu_uses
from nibble.machine.hardware import detect
from nibble.machine.targets import Target
from nibble.plan.choice import values_of
from nibble.plan.expert_shapes import expert_uses
from nibble.plan.fp4_products import COLUMN_MULTIPLE, has_our_fp4_products
from nibble.plan.gather import Asked, choose_target, plan_for, read_wishes
from nibble.plan.linear_shapes import e4m3_uses, linear_uses
from nibble.plan.part_kernels import DEFAULT_SEQUENCES
from nibble.serve.preflight.machine import check_hardware
from nibble.trials.choose import (
    E4M3,
    E4M3_FORMS,
    EXPERTS,
    EXPERTS_FP4,
    LINEAR,
    LINEAR_FP4,
    TIMED_ROWS,
    Form,
    ShapeChoice,
    Use,
    choose,
)
from nibble.trials.findings import not_idle
from nibble.trials.place import place_of
from nibble.trials.record import open_record
from nibble.trials.trial import Outcome, Shape
from nibble.trials.tune import WORK_S, Wanted, tune

LINEAR_NUMBERS, EXPERT_NUMBERS = 2, 5  # of a shape
SHAPE = re.compile(r"\d{1,7}(x\d{1,7})+")


def tune_model(
    words: Sequence[str],
    environ: Mapping[str, str],
    shapes: Sequence[str] = (),
    plants: Sequence[str] = (),
    work_s: float = WORK_S,
) -> dict[str, Any]:
    """Time every shape of a model, or the `shapes` given, and keep the result for plans.

    Raises NO_HARDWARE without a GPU, MODEL and CONFIG for a model without NVFP4 layers, and CANARY
    where both kernels of a part failed.
    """
    given, faults = tuple(map(_use, shapes)), faults_of(plants)
    asked = read_wishes(words, environ)
    hardware = detect(asked.accepted.environ)
    target, _ = choose_target(asked.settings, asked, hardware)
    if target.device != "cuda":
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what="the CPU has one linear kernel for NVFP4, so nothing is chosen by time",
            expected="a GPU",
            action="run `nibble selftest` to check the CPU's kernels",
        )
    if not hardware.gpus:
        check_hardware(target, hardware)
    uses, sequences, child = _wanted(asked, given)
    for finding in not_idle(gpu_uses(gpu.index for gpu in hardware.gpus)):
        say(f"warning: {finding.line()}")
    record = open_record(asked.cache, place_of(target, hardware), say)
    parts = _parts(uses, target)
    kept, outcomes = tune(
        parts,
        record,
        child,
        faults=faults,
        work_s=work_s,
        on_done=lambda outcome: say(f"{outcome.line()}, {outcome.seconds:.1f} s"),
    )
    if not plants:
        kept.save(say)
    choices = [
        choice for each in parts for choice in choose(each.uses, kept, "vllm", sequences, each.part)
    ]
    return _result(outcomes, choices, str(kept.path))


def _parts(uses: Sequence[Use], target: Target) -> list[Wanted]:
    """Linear layers and experts, by what multiplies their activations. Without nibble's kernel
    there is no choice for experts.
    """
    in_fp8 = [use for use in uses if use.form in E4M3_FORMS]
    in_fp4 = [use for use in uses if use.form == "fp4" and target.features.has_fp4_mma]
    others = [use for use in uses if use not in in_fp4 and use not in in_fp8]
    with_ours = has_our_fp4_products(target) or not in_fp4
    parts = [Wanted(in_fp8, E4M3)] if in_fp8 else []
    for some, linear_part, expert_part in (
        (others, LINEAR, EXPERTS),
        (in_fp4, LINEAR_FP4, EXPERTS_FP4),
    ):
        linear = [use for use in some if len(use.shape) == LINEAR_NUMBERS]
        experts = [use for use in some if use not in linear]
        parts += [Wanted(linear, linear_part, with_ours)] if linear else []
        parts += [Wanted(experts, expert_part)] if experts and with_ours else []
    return parts


def _wanted(asked: Asked, given: tuple[Use, ...]) -> tuple[tuple[Use, ...], int, Mapping[str, str]]:
    """Shapes, sequences and the environment of vLLM's kernels."""
    environ = asked.accepted.environ
    if given:
        return given, DEFAULT_SEQUENCES, environ
    plan = plan_for(asked)
    values = values_of(plan.args)
    checkpoint = plan.checkpoint
    if checkpoint is None:
        raise NibbleError(
            ExitCode.MODEL,
            what=f"the shapes of {asked.settings.model} are unknown ({plan.checkpoint_note})",
            action="run `nibble pull` first, or give --shape",
        )
    form: Form = "fp4" if "fp4" in checkpoint.scheme.activations else "bf16"
    split = int(values.get("--tensor-parallel-size", 1))
    uses = linear_uses(checkpoint, split, form) + expert_uses(checkpoint, values, form)
    if checkpoint.scheme.is_nvfp4:  # FP8 layers without NVFP4 ones are vLLM's
        uses += e4m3_uses(checkpoint, split)
    if not uses:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{checkpoint.id} has no NVFP4 layers",
            expected="an NVFP4 checkpoint",
            action="name another model",
        )
    sequences = int(values.get("--max-num-seqs") or DEFAULT_SEQUENCES)
    return uses, sequences, plan.vllm_environ(environ)


def _use(word: str) -> Use:
    """`4096x4096`, `4096x4096:fp4`, `4096x4096:fp8` or `128x8x2048x768x2`. Raises USAGE."""
    name, _, form = word.partition(":")
    known = next((each for each in get_args(Form) if each == (form or "bf16")), None)
    if not SHAPE.fullmatch(name) or known is None:
        expected = "ROWSxCOLUMNS, such as 4096x14336, with :fp4 for W4A4 or :fp8 for an FP8 layer"
        raise _bad_shape(word, expected)
    shape = tuple(map(int, name.split("x")))
    if len(shape) == LINEAR_NUMBERS:
        columns = COLUMN_MULTIPLE if form == "fp4" else 16
        rows = 16 if form == "fp8-block" else 8
        if shape[0] % rows or shape[1] % columns or 0 in shape:
            expected = f"rows that are a multiple of {rows} and columns that are one of {columns}"
            raise _bad_shape(word, expected)
    elif len(shape) != EXPERT_NUMBERS or not _is_possible(shape) or known in E4M3_FORMS:
        expected = (
            "experts, experts of a token, hidden and intermediate size in 16s, and 2 with a gate or"
            " 1 without"
        )
        raise _bad_shape(word, expected)
    return Use(shape, 1, known)


def _is_possible(shape: Shape) -> bool:
    experts, chosen, hidden, intermediate, halves = shape
    return (
        0 < chosen <= experts
        and hidden > 0 == hidden % 16
        and intermediate > 0 == intermediate % 16
        and halves in (1, 2)
    )


def _bad_shape(word: str, expected: str) -> NibbleError:
    return NibbleError(
        ExitCode.USAGE, what=f"--shape {word}", expected=expected, action="correct --shape"
    )


def _result(
    outcomes: Sequence[Outcome], choices: Sequence[ShapeChoice], path: str
) -> dict[str, Any]:
    if outcomes and all(outcome.is_fault for outcome in outcomes):
        raise NibbleError(
            ExitCode.CANARY,
            what=f"every kernel failed: {'; '.join(outcome.line() for outcome in outcomes)}",
            action="run `nibble selftest` and check the driver",
        )
    return {
        "kernels": [outcome.to_json() for outcome in outcomes],
        "shapes": [choice.to_json() for choice in choices],
        "record": path,
    }


def show_tuned(found: Mapping[str, Any]) -> None:
    """Print both times of each shape and bucket in microseconds, and the choice."""
    console = wide_console()
    for kernel in found["kernels"]:
        detail = f": {kernel['detail']}" if kernel["detail"] else ""
        ran = f" ({kernel['ran']})" if kernel["ran"] else ""
        console.print(escape(f"{kernel['name']}{ran} is {kernel['verdict']}{detail}"))
    console.print(times_table(found["shapes"]))


def times_table(shapes: Sequence[Mapping[str, Any]]) -> Any:
    """A row a shape: nibble's / vLLM's time for each number of rows, and the choice."""
    headings = [str(rows) for rows in TIMED_ROWS[:-1]] + [f"prompt ({TIMED_ROWS[-1]})"]
    table = plain_table("shape", "layers", *headings, "mean", "kernel", "why")
    for shape in shapes:
        times = [
            _both(shape["nibble_us"].get(str(rows)), shape["vllm_us"].get(str(rows)))
            for rows in TIMED_ROWS
        ]
        ratio = "" if shape["ratio"] is None else f"{shape['ratio']:.2f}"
        table.add_row(
            *(shape["shape"], str(shape["layers"]), *times, ratio, shape["kernel"]),
            escape(shape["why"]),
        )
    table.title = "microseconds of nibble's / vLLM's kernel by rows"
    table.title_justify, table.title_style = "left", "bold"
    return table


def _both(ours: float | None, theirs: float | None) -> str:
    if ours is None and theirs is None:
        return "-"
    return " / ".join("?" if time is None else f"{time:.1f}" for time in (ours, theirs))
