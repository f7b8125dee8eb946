"""nibble's product of E4M3 numbers with each kind of scales, against float64, then times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nibble.trials.trial import Shape, Times, Trial, shape_name
from nibble.trials.worker.kernels import Prepared, Refused, require_compiled
from nibble.trials.worker.linear import timed
from nibble.trials.worker.planted import with_fault
from nibble.trials.worker.tasks import Teller
from nibble.trials.worker.timing import beside_others
from nibble.trials.worker.truth import (
    PART_OF_NORMS,
    PART_OF_RESULT,
    ROW_LIMITS,
    activations,
    judge,
    outcome,
)

# A scale of the tensor, of each token and row of the weight, of 128 columns and 128 by 128 blocks.
Kind = Literal["tensor", "channel", "block"]
TIMED: Kind = "channel"
BLOCK = 128
LARGEST = 448.0  # of E4M3


class Numbers(NamedTuple):
    """Codes, float8_e4m3fn [R, K], and float32 scales [R / rows, K / columns] of blocks."""

    codes: Tensor
    scales: Tensor
    rows: int
    columns: int

    def values(self) -> Tensor:
        """In float64."""
        by_row = self.scales.double().repeat_interleave(self.rows, 0)[: len(self.codes)]
        scales = by_row.repeat_interleave(self.columns, 1)[:, : self.codes.shape[1]]
        return self.codes.float().double() * scales


def quantized(x: Tensor, kind: Kind, rows: int) -> Numbers:
    """x with scales of this kind; `rows` are those of a block."""
    sizes = {"tensor": tuple(x.shape), "channel": (1, x.shape[1]), "block": (rows, BLOCK)}
    rows, columns = sizes[kind]
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % columns, 0, -len(x) % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp(min=2.0**-100)
    codes = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    codes = codes.flatten(2).flatten(0, 1)[: len(x), : x.shape[1]]
    return Numbers(codes.to(torch.float8_e4m3fn).contiguous(), scales, rows, columns)


def uneven(rows: int, columns: int, block_rows: int, device: str, seed: int) -> Tensor:
    """Normal numbers times powers of two of each row and block, so that their scales differ."""
    generator = torch.Generator(device=device).manual_seed(seed + 100)

    def powers(*shape: int) -> Tensor:
        return 2.0 ** torch.randint(-2, 3, shape, device=device, generator=generator)

    blocks = powers(-(-rows // block_rows), -(-columns // BLOCK))
    factors = blocks.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(BLOCK, 1)
    x = activations(rows, columns, device, seed) * factors[:, :columns] * powers(rows, 1)
    return x.bfloat16()


@torch.inference_mode()
def run(trial: Trial, say: Teller) -> dict[str, Any]:
    """The verdict over all shapes and kinds of scales; times of one kind."""
    worst, times = 0.0, Times()
    try:
        require_compiled(trial.device)
    except Refused as why:
        return {"verdict": "refused", "detail": str(why)}
    for shape in trial.shapes:
        for kind in get_args(Kind):
            say(f"prepare:{shape_name(shape)}, scales of a {kind}")
            given = uneven(shape[0], shape[1], BLOCK, trial.device, 3)
            weight = quantized(given, kind, BLOCK)
            with beside_others(trial.lock):
                fault, error = _compared(trial, weight, kind, say)
            worst = max(worst, error)
            if fault:
                return outcome(fault, worst, ran="nibble", times=times)
            if kind == TIMED and trial.timed_rows:
                times[shape_name(shape)] = _timed(trial, weight, kind, shape, say)
                say.times(shape_name(shape), times[shape_name(shape)])
    return outcome("", worst, ran="nibble", times=times)


def _compared(trial: Trial, weight: Numbers, kind: Kind, say: Teller) -> tuple[str, float]:
    """The first fault, empty if all products are right, and the largest error. Without a bias where
    the tensor has one scale, else with one.
    """
    values, worst = weight.values(), 0.0
    bias = None if kind == "tensor" else activations(1, len(values), trial.device, seed=5)[0]
    for rows in trial.rows:
        place = f"{shape_name(values.shape)} with {rows} rows, scales of a {kind}"
        say(f"run:{place}")
        given = uneven(rows, values.shape[1], 1, trial.device, 1)
        y = with_fault(lambda x: product(x, weight, kind, bias), trial.plant)(given)
        if not y.isfinite().all():
            return f"{place}: NaN or infinity", float("inf")
        x = quantized(given, kind, 1).values()
        right, norms = x @ values.T, x.norm(dim=-1)[:, None] * values.norm(dim=-1)
        if bias is not None:
            right += bias.double()
        bound = PART_OF_RESULT * right.abs() + PART_OF_NORMS["bf16"] * norms
        fault, error = judge(y.double(), right, bound, ROW_LIMITS["bf16"], place)
        worst = max(worst, error)
        if fault:
            return fault, worst
    return "", worst


def product(x: Tensor, weight: Numbers, kind: Kind, bias: Tensor | None) -> Tensor:
    return _multiply(quantized(x, kind, 1), weight, kind, bias)


def _multiply(x: Numbers, weight: Numbers, kind: Kind, bias: Tensor | None) -> Tensor:
    from nibble_kernels.fp8_linear import fp8_linear

    scales = (x.scales, weight.scales)
    if kind != "block":
        scales = (x.scales.flatten(), weight.scales.flatten())
    blockwise = kind == "block"
    return fp8_linear(
        x.codes, weight.codes, *scales, torch.bfloat16, bias=bias, blockwise=blockwise
    )


def _timed(
    trial: Trial, weight: Numbers, kind: Kind, shape: Shape, say: Teller
) -> dict[str, float]:
    """Of the product alone: x is quantized before."""

    def of(used: Numbers) -> Callable[[Tensor], Tensor]:
        known = dict[int, Numbers]()

        def call(x: Tensor) -> Tensor:
            if len(x) not in known:
                known[len(x)] = quantized(x, kind, 1)
            return _multiply(known[len(x)], used, kind, None)

        return call

    def again() -> Callable[[Tensor], Tensor]:
        return of(weight._replace(codes=weight.codes.clone()))

    return timed(trial, Prepared(of(weight), again=again), shape, say)
