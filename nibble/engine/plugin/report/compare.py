"""How far an output is from the right one, and results of many layers as a few entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.engine.contract import LayerCheck, Part

# Of |y - right| / |right|, row by row. Outputs rounded to BF16 differ by 0.003; where activations
# fall on the other side of a rounding to FP4, by some thousandths more. With an FP8 cache backends
# may round queries and probabilities to FP8 too (0.03 each). A doubled scale gives 1, swapped
# nibbles more, one zeroed head of 32 gives 0.18.
LIMITS: Mapping[str, float] = {
    "plain": 0.02,
    "bf16": 0.02,
    "fp8": 0.12,
    "fp4": 0.06,
    "fp4, one scale": 0.06,
}
# what is between w13 and w2 is rounded to FP4 as well; kernels have it in BF16 or float32 before
# that
EXPERTS_LIMIT = 0.15
NAMED = 5  # wrong layers whose names are told


@dataclass(frozen=True)
class Result:
    """One comparison. `form` is the number format of the activations of an NVFP4 layer, or of the
    KV cache, that fits best; "plain" where there is no choice. `problem` is empty where all is
    right.

    `error` is the worst row's; infinite where values are not finite. None: nothing was compared,
    `problem` says why.
    """

    part: Part
    kind: str
    name: str
    form: str = ""
    error: float | None = None
    problem: str = ""


def compare(
    part: Part, kind: str, name: str, found: Tensor, expected: Mapping[str, Tensor]
) -> Result:
    """`found` [rows, N] against the nearest of the forms that are right, each [rows, N] in
    float32.
    """
    values = found.detach().float().cpu()
    if not values.isfinite().all():
        return Result(part, kind, name, "", float("inf"), "NaN or infinity")
    errors = {form: relative_error(values, right) for form, right in expected.items()}
    form = min(errors, key=lambda one: errors[one] / limit_of(part, one))
    error, limit = errors[form], limit_of(part, form)
    return Result(
        part,
        kind,
        name,
        form,
        error,
        "" if error <= limit else f"off by {error:.3g}, at most {limit}",
    )


def limit_of(part: Part, form: str) -> float:
    return EXPERTS_LIMIT if part == "moe" and form.startswith("fp4") else LIMITS[form]


def relative_error(found: Tensor, right: Tensor) -> float:
    """The largest |found - right| / |right| of a row."""
    if found.shape != right.shape:
        return float("inf")
    norms = right.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found - right).norm(dim=-1) / norms).max())


def group(results: Iterable[Result]) -> list[LayerCheck]:
    """One entry for each part and kind: layers, how many of them were compared, the worst error,
    and what is wrong.
    """
    kinds: dict[tuple[Part, str], list[Result]] = {}
    for result in results:
        kinds.setdefault((result.part, result.kind), []).append(result)
    return [_entry(part, kind, found) for (part, kind), found in kinds.items()]


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
        "activations": sorted({one.form for one in results if one.form and not one.problem}),
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
