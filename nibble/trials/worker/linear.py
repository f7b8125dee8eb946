"""A kernel for linear layers: truth for each shape and number of rows, then times."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nibble.trials.trial import Shape, Times, Trial, shape_name
from nibble.trials.worker.kernels import (
    Prepared,
    Refused,
    fitting,
    prepare,
    stored_activations,
)
from nibble.trials.worker.planted import Product, with_fault
from nibble.trials.worker.tasks import Teller
from nibble.trials.worker.timing import alone, beside_others, copies_beyond_the_cache, seconds_of
from nibble.trials.worker.truth import Truth, activations, outcome, random_weight


@torch.inference_mode()
def run(trial: Trial, say: Teller) -> dict[str, Any]:
    """The verdict over all shapes. Times only of a kernel that is right for a shape."""
    worst, ran, times = 0.0, "", Times()
    try:
        if trial.rows and (fault := exact_products(trial, say)):
            return outcome(fault, None)
        for shape in trial.shapes:
            say(f"prepare:{shape_name(shape)}")
            weight = fitting(trial.kernel, random_weight(shape, trial.device))
            prepared = prepare(trial.kernel, weight)
            ran = prepared.ran
            prepared.product(activations(prepared.least_rows, shape[1], trial.device))
            with beside_others(trial.lock):
                fault, error = compared(trial, prepared, Truth(weight), say)
            worst = max(worst, error)
            if fault:
                return outcome(fault, worst, ran=ran, times=times)
            if trial.timed_rows:
                times[shape_name(shape)] = timed(trial, prepared, shape, say)
                say.times(shape_name(shape), times[shape_name(shape)])
            torch.cuda.empty_cache() if trial.device == "cuda" else None
    except Refused as why:
        return {"verdict": "refused", "detail": str(why)}
    return outcome("", worst, ran=ran, times=times)


def compared(trial: Trial, prepared: Prepared, truth: Truth, say: Teller) -> tuple[str, float]:
    """The first fault, and the largest error."""
    product, worst = with_fault(prepared.product, trial.plant), 0.0
    for rows in trial.rows:
        if rows < prepared.least_rows or rows > (prepared.most_rows or rows):
            continue
        x = activations(rows, truth.shape[1], trial.device)
        first_call(trial, prepared, truth.shape, x, say)
        say(f"run:{shape_name(truth.shape)} with {rows} rows")
        y = product(x)
        stored = stored_activations(x, prepared.form)
        fault, error = truth.fault(y, x, prepared.form, stored)
        worst = max(worst, error)
        if not fault:
            fault, error = compared_epilogues(prepared, truth, x, stored)
            worst = max(worst, error)
        if fault:
            return fault, error
    return "", worst


def compared_epilogues(
    prepared: Prepared, truth: Truth, x: Tensor, stored: Tensor | None
) -> tuple[str, float]:
    """The first fault of what a kernel does after the sum, and the largest error. `stored`: x as
    the kernel rounds it.
    """
    exact = x.double() if stored is None else stored
    fault, worst = "", 0.0
    if prepared.with_factors is not None:
        factors = activations(1, truth.shape[0], str(x.device), seed=4)[0].float().abs() + 0.5
        bias = activations(1, truth.shape[0], str(x.device), seed=5)[0]
        y = prepared.with_factors(x, factors, bias)
        fault, worst = truth.fault_of_factors(y, exact, factors, bias, prepared.form)
    if prepared.with_silu is not None and not fault:
        fault, error = truth.fault_of_silu(prepared.with_silu(x), exact, prepared.form)
        worst = max(worst, error)
    return fault, worst


def timed(trial: Trial, prepared: Prepared, shape: Shape, say: Teller) -> dict[str, float]:
    """Rows -> microseconds of one product whose weight is not in a cache."""
    found: dict[str, float] = {}
    count = copies_beyond_the_cache(shape[0] * shape[1] * 9 // 16, trial.device)
    # A waiting process is not a hanging one: the phase has no limit.
    say("wait:for its turn")
    with alone(trial.lock):
        products = [prepared.product]
        if prepared.again is not None:
            products += [prepared.again() for _ in range(count - 1)]
        for rows in trial.timed_rows:
            if rows < prepared.least_rows or rows > (prepared.most_rows or rows):
                continue
            x = activations(rows, shape[1], trial.device)
            first_call(trial, prepared, shape, x, say)
            say(f"run:{shape_name(shape)} with {rows} rows, timed")
            # Prompts read a weight once for many rows, so caches matter less.
            used = products if rows <= 64 else products[:2]
            calls = [partial(_call, with_fault(product, trial.plant), x) for product in used]
            found[str(rows)] = round(seconds_of(calls, trial.device, trial.seconds_each) * 1e6, 3)
    return found


def first_call(trial: Trial, prepared: Prepared, shape: Shape, x: Tensor, say: Teller) -> None:
    """Call a kernel of vLLM's in the phase that may compile: some compile for each number of rows.
    nibble's kernels are compiled.
    """
    if trial.kernel.startswith("vllm:"):
        say(f"prepare:{shape_name(shape)} with {len(x)} rows")
        prepared.product(x)
        if x.is_cuda:
            torch.cuda.synchronize()


def _call(product: Product, x: Tensor) -> Tensor:
    return product(x)


def exact_products(trial: Trial, say: Teller) -> str:
    """Compare 2^16 - 512 products: each byte of two codes under each scale that is a number.

    x selects one column after the other, so no sum rounds and all must be equal. Only nibble's
    kernels take a weight of 16 columns. Returns the fault.
    """
    from nibble.trials.worker.truth import Weight, values

    if trial.kernel.startswith("vllm") or trial.kernel.endswith("fp4"):
        return ""
    say("prepare:all products of codes and scales")
    device = trial.device
    numbers = torch.tensor(
        [byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8, device=device
    )
    scales = numbers.repeat_interleave(256)[:, None].contiguous().view(torch.float8_e4m3fn)
    codes = torch.arange(256, device=device).to(torch.uint8).repeat(len(numbers))[:, None]
    weight = fitting(trial.kernel, Weight(codes.expand(-1, 8).contiguous(), scales, 1.0))
    prepared = prepare(trial.kernel, weight)
    right = values(weight.codes, weight.scales).T + 0.0
    say("run:all products of codes and scales")
    x = torch.eye(16, dtype=torch.bfloat16, device=device)
    repeated = x.repeat(-(-prepared.least_rows // 16), 1)
    y = with_fault(prepared.product, trial.plant)(repeated)[-16:].double() + 0.0
    if not y.isfinite().all():
        return "all products of codes and scales: NaN or infinity"
    for column in range(16):
        if not torch.equal(y[column], right[column]):
            at = int((y[column] != right[column]).nonzero()[0])
            found, expected = float(y[column, at]), float(right[column, at])
            byte, scale = at % 256, int(numbers[at // 256])
            what = f"{found:.6g} in place of {expected:.6g}"
            return f"codes 0x{byte:02x} under scale 0x{scale:02x}: {what}"
    return ""
