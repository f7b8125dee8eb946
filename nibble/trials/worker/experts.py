"""A layer of experts: the sum of the chosen experts' MLPs against float64, then times.

With gate and up the function is silu · mul, with up alone relu², as published NVFP4 models have
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nibble.trials.trial import Shape, Times, Trial, shape_name
from nibble.trials.worker.kernels import (
    INPUT_SCALE,
    Refused,
    require_compiled,
    stored_activations,
)
from nibble.trials.worker.planted import with_fault
from nibble.trials.worker.tasks import Teller
from nibble.trials.worker.timing import alone, beside_others, seconds_of
from nibble.trials.worker.truth import (
    GLOBAL_SCALE,
    PART_OF_RESULT,
    activations,
    judge,
    outcome,
    random_weight,
    values,
)

if TYPE_CHECKING:
    from nibble_kernels.nvfp4_moe.weight import PreparedExperts

# h is rounded to BF16 between the products. Where it is rounded to FP4, another order of its sums
# may choose another code.
LIMITS = {"bf16": 0.02, "fp4": 0.06}
PART_OF_NORMS = {"bf16": 2.0**-7, "fp4": 2.0**-6}

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Prepared(NamedTuple):
    """A layer in a kernel's layout, the name of what computes and the format of activations."""

    call: Call
    ran: str
    form: str = "bf16"


class Layer:
    """Random experts with one global scale. For `shape` see trial.Shape."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.experts, self.topk, self.hidden, self.inner, halves = shape
        self.shape, self.gated = shape, halves == 2
        sizes = ((halves * self.inner, self.hidden, 10), (self.hidden, self.inner, 10_000))
        parts = [
            [random_weight((rows, columns), device, seed + e) for e in range(self.experts)]
            for rows, columns, seed in sizes
        ]
        self.codes = [torch.stack([each.codes for each in part]) for part in parts]
        self.scales = [torch.stack([each.scales for each in part]) for part in parts]
        self.factors = torch.full((self.experts,), GLOBAL_SCALE, dtype=torch.float32, device=device)
        # Of x and h, for FP4 activations: another one for each expert.
        steps = torch.arange(self.experts, dtype=torch.float32, device=device) / self.experts
        self.input_scales = [(1 + steps) * INPUT_SCALE, (2 - steps) * INPUT_SCALE]

    @property
    def activation(self) -> str:
        """A value of vLLM's MoEActivation."""
        return "silu" if self.gated else "relu2_no_mul"

    @property
    def function(self) -> str:
        """The same by its name in nibble_kernels."""
        return "silu" if self.gated else "relu2"

    def right(self, x: Tensor, weights: Tensor, ids: Tensor, form: str) -> tuple[Tensor, Tensor]:
        """The sum in float64, and for each result the bound of its error."""
        out = torch.zeros(len(x), self.hidden, dtype=torch.float64, device=x.device)
        norms = torch.zeros_like(out)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = (
                values(codes[expert], scales[expert]) * GLOBAL_SCALE
                for codes, scales in zip(self.codes, self.scales, strict=True)
            )
            scales = [float(part[expert]) for part in self.input_scales]
            h = self._activated(_stored(x[token], form, scales[0]) @ w13.T)
            h = _stored(h, form, scales[1])
            factor = weights[token, place].double()[:, None]
            out.index_add_(0, token, factor * (h @ w2.T))
            norms.index_add_(0, token, factor * h.norm(dim=-1)[:, None] * w2.norm(dim=-1))
        return out, PART_OF_RESULT * out.abs() + PART_OF_NORMS[form] * norms

    def _activated(self, sums: Tensor) -> Tensor:
        if not self.gated:
            return sums.relu().square()
        gate, up = sums.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _stored(x: Tensor, form: str, input_scale: float) -> Tensor:
    """x, or h, as it is multiplied, in float64."""
    stored = stored_activations(x.bfloat16(), form, input_scale)
    return x.double() if stored is None else stored


@torch.inference_mode()
def run(trial: Trial, say: Teller) -> dict[str, Any]:
    """The verdict over all shapes. Times only of a kernel that is right for a shape."""
    worst, ran, times = 0.0, "", Times()
    try:
        for shape in trial.shapes:
            name = shape_name(shape)
            say(f"prepare:experts {name}")
            layer = Layer(shape, trial.device)
            call, ran, form = prepare(trial.kernel, layer)
            with beside_others(trial.lock):
                fault, error = _compared(trial, layer, call, form, say)
            worst = max(worst, error)
            if fault:
                return outcome(fault, worst, ran=ran, times=times)
            if trial.timed_rows:
                times[name] = _timed(trial, layer, call, say)
                say.times(name, times[name])
    except Refused as why:
        return {"verdict": "refused", "detail": str(why)}
    return outcome("", worst, ran=ran, times=times)


def prepare(kernel: str, layer: Layer) -> Prepared:
    """Raises Refused."""
    if kernel.startswith("vllm:"):
        from nibble.trials.worker.vllm_experts import vllm_experts

        return Prepared(*vllm_experts(kernel.rpartition(":")[2], layer))
    if kernel == "w4a4-experts":
        return Prepared(_w4a4(layer), "nibble", "fp4")
    if layer.codes[0].is_cuda:
        return Prepared(_gpu(layer), "nibble")
    return Prepared(_cpu(layer, kernel), "nibble")


def _compared(trial: Trial, layer: Layer, call: Call, form: str, say: Teller) -> tuple[str, float]:
    """The first fault, empty if all sums are right, and the largest error."""
    worst = 0.0
    for rows in trial.rows:
        place = f"{shape_name(layer.shape)} with {rows} tokens"
        x = activations(rows, layer.hidden, trial.device)
        weights, ids = _routing(layer, rows, trial.device)
        _first_call(trial, call, place, x, weights, ids, say)
        say(f"run:experts {place}")
        y = with_fault(lambda x, w=weights, i=ids: call(x, w, i), trial.plant)(x)
        if not y.isfinite().all():
            return f"{place}: NaN or infinity", float("inf")
        right = layer.right(x, weights, ids, form)
        fault, error = judge(y.double(), *right, LIMITS[form], place)
        worst = max(worst, error)
        if fault:
            return fault, worst
    return "", worst


def _timed(trial: Trial, layer: Layer, call: Call, say: Teller) -> dict[str, float]:
    """Tokens -> microseconds of the layer. Each call has another routing, so that caches do not
    hold the experts in use.
    """
    found: dict[str, float] = {}
    say("wait:for its turn")
    with alone(trial.lock):
        for rows in trial.timed_rows:
            place = f"{shape_name(layer.shape)} with {rows} tokens, timed"
            x = activations(rows, layer.hidden, trial.device)
            routings = [
                _routing(layer, rows, trial.device, seed) for seed in range(_routings(rows))
            ]
            _first_call(trial, call, place, x, *routings[0], say)
            say(f"run:experts {place}")
            calls = [partial(_call, call, x, *routing) for routing in routings]
            found[str(rows)] = round(seconds_of(calls, trial.device, trial.seconds_each) * 1e6, 3)
    return found


def _call(call: Call, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return call(x, weights, ids)


def _routings(rows: int) -> int:
    return 16 if rows <= 8 else 8 if rows <= 256 else 2


def _first_call(
    trial: Trial, call: Call, place: str, x: Tensor, weights: Tensor, ids: Tensor, say: Teller
) -> None:
    """In the phase that may compile: vLLM's kernels do, for some numbers of tokens."""
    if trial.kernel.startswith("vllm:"):
        say(f"prepare:experts {place}")
        call(x, weights, ids)
        if x.is_cuda:
            torch.cuda.synchronize()


def _routing(layer: Layer, rows: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 4096 * seed)
    scores = torch.rand(rows, layer.experts, generator=generator)
    weights, ids = scores.softmax(-1).topk(layer.topk, dim=-1)
    return weights.to(device), ids.to(torch.int32).to(device)


def _gpu(layer: Layer) -> Call:
    from nibble_kernels.nvfp4_linear.weight import wants_native
    from nibble_kernels.nvfp4_moe.gpu import nvfp4_weight_moe

    require_compiled("cuda")
    if not layer.gated and torch.cuda.get_device_capability() != (9, 0):
        raise Refused("experts without gate are compiled for compute capability 9.0 alone")
    w13, w2 = _prepared(layer, wants_native(torch.bfloat16, layer.factors.device))
    return lambda x, weights, ids: nvfp4_weight_moe(
        x, weights, ids, w13, w2, function=layer.function, gated=layer.gated
    )


def _w4a4(layer: Layer) -> Call:
    from nibble_kernels.nvfp4_moe.w4a4 import nvfp4_w4a4_moe

    require_compiled(layer.factors.device.type)
    w13, w2 = _prepared(layer, native=True)
    return lambda x, weights, ids: nvfp4_w4a4_moe(
        x, weights, ids, w13, w2, *layer.input_scales, function=layer.function, gated=layer.gated
    )


def _prepared(layer: Layer, native: bool) -> Iterator[PreparedExperts]:
    from nibble_kernels.nvfp4_moe.weight import prepare_experts

    for codes, scales in zip(layer.codes, layer.scales, strict=True):
        yield prepare_experts(codes, scales, layer.factors, native)


def _cpu(layer: Layer, kernel: str) -> Call:
    """`experts:LEVEL`, or `experts` with this processor's best instructions."""
    from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level
    from nibble_kernels.nvfp4_moe.packed import nvfp4_packed_moe, pack_experts

    level = kernel.partition(":")[2]
    if level and level not in cpu_levels():
        raise Refused(f"this processor has no {level}, or nibble-kernels was not compiled")
    if level:
        use_cpu_level(level)
    w13, w2 = (
        pack_experts(codes.clone(), scales.clone())
        for codes, scales in zip(layer.codes, layer.scales, strict=True)
    )
    first = layer.factors[:, None].expand(-1, 2 if layer.gated else 1).contiguous()
    return lambda x, weights, ids: nvfp4_packed_moe(
        x, weights, ids, *w13, first, *w2, layer.factors, layer.activation
    )
