"""Compares the output of a layer with the expected one, and groups the results of many layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.engine.contract.report import LayerCheck, Part

# Limits of |y - expected| / |expected| of each row. Rounding to BF16 changes outputs by 0.003, and
# changed FP4 codes of activations by a few thousandths more. With an FP8 cache, backends may also
# round queries and probabilities to FP8 (0.03 each). For comparison: a doubled scale gives 1,
# swapped nibbles more, and one zeroed head of 32 gives 0.18.
LIMITS: Mapping[str, float] = {
    "plain": 0.02,
    "bf16": 0.02,
    "fp8": 0.12,
    "fp4": 0.06,
    "fp4, one scale": 0.06,
}
# Experts also round the values between w13 and w2 to FP4, which kernels have in BF16 or float32.
EXPERTS_LIMIT = 0.15
NAMED = 5  # reported names of wrong layers, at most


@dataclass(frozen=True)
class Result:
    """The result of one comparison.

    form: the format of activations or KV cache that fits best; "plain" if there is only one.
    error: the largest relative error of a row, infinite for NaN or infinity; None if nothing was
    compared. problem: what is wrong, or why nothing was compared; empty for a correct layer.
    """

    part: Part
    kind: str
    name: str
    form: str = ""
    error: float | None = None
    problem: str = ""


def compare(
    part: Part, kind: str, name: str, output: Tensor, expected: Mapping[str, Tensor]
) -> Result:
    """Compare `output` [rows, N] with the nearest expected output.

    expected: format of activations -> float32 [rows, N].
    """
    values = output.detach().float().cpu()
    if not values.isfinite().all():
        return Result(part, kind, name, "", float("inf"), "NaN or infinity")
    errors = {form: relative_error(values, right) for form, right in expected.items()}
    form = min(errors, key=lambda form: errors[form] / limit_of(part, form))
    error, limit = errors[form], limit_of(part, form)
    problem = "" if error <= limit else f"off by {error:.3g}, at most {limit}"
    return Result(part, kind, name, form, error, problem)


def limit_of(part: Part, form: str) -> float:
    """The largest relative error of a correct layer."""
    return EXPERTS_LIMIT if part == "moe" and form.startswith("fp4") else LIMITS[form]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest |actual - expected| / |expected| of a row; infinite for different shapes."""
    if actual.shape != expected.shape:
        return float("inf")
    norms = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((actual - expected).norm(dim=-1) / norms).max())


def group(results: Iterable[Result]) -> list[LayerCheck]:
    """One contract.report.LayerCheck for each part and kind."""
    kinds: dict[tuple[Part, str], list[Result]] = {}
    for result in results:
        kinds.setdefault((result.part, result.kind), []).append(result)
    return [_entry(part, kind, same) for (part, kind), same in kinds.items()]


def _entry(part: Part, kind: str, results: list[Result]) -> LayerCheck:
    errors = [result.error for result in results if result.error is not None]
    wrong = {
        f"{result.name}: {result.problem}": None
        for result in results
        if result.error is not None and result.problem
    }
    skipped = {result.problem: None for result in results if result.error is None}
    return {
        "part": part,
        "kind": kind,
        "layers": len({result.name for result in results}),
        "compared": len({result.name for result in results if result.error is not None}),
        "activations": sorted({each.form for each in results if each.form and not each.problem}),
        "worst_error": (
            None
            if not errors
            else str(max(errors))
            if max(errors) == float("inf")
            else round(max(errors), 5)
        ),
        "wrong": len({text.partition(":")[0] for text in wrong}),
        "wrong_layers": list(wrong)[:NAMED],
        "not_compared": list(skipped)[:NAMED],
    }
