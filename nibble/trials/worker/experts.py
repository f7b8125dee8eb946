"""nibble's experts: the sum of the chosen experts' MLPs against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nibble.trials.trial import Trial, shape_name
from nibble.trials.worker.kernels import Refused
from nibble.trials.worker.planted import with_fault
from nibble.trials.worker.truth import (
    GLOBAL_SCALE,
    PART_OF_RESULT,
    activations,
    judge,
    outcome,
    random_weight,
    values,
)

EXPERTS, TOPK = 8, 2
LIMIT = 0.02  # h is rounded to BF16 between the products
PART_OF_NORMS = 2.0**-7

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer:
    """Random experts. `intermediate` and `hidden` are the shape of a trial."""

    def __init__(self, intermediate: int, hidden: int, device: str) -> None:
        w13 = [random_weight((2 * intermediate, hidden), device, 10 + e) for e in range(EXPERTS)]
        w2 = [random_weight((hidden, intermediate), device, 50 + e) for e in range(EXPERTS)]
        self.codes = [torch.stack([each.codes for each in part]) for part in (w13, w2)]
        self.scales = [torch.stack([each.scales for each in part]) for part in (w13, w2)]
        self.factors = torch.full((EXPERTS,), GLOBAL_SCALE, device=device)
        self.hidden = hidden

    def right(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The sum in float64, and for each result the bound of its error."""
        out = torch.zeros(len(x), self.hidden, dtype=torch.float64, device=x.device)
        norms = torch.zeros_like(out)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = (
                values(codes[expert], scales[expert]) * GLOBAL_SCALE
                for codes, scales in zip(self.codes, self.scales, strict=True)
            )
            gate, up = (x[token].double() @ w13.T).chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up
            factor = weights[token, place].double()[:, None]
            out.index_add_(0, token, factor * (h @ w2.T))
            norms.index_add_(0, token, factor * h.norm(dim=-1)[:, None] * w2.norm(dim=-1))
        return out, PART_OF_RESULT * out.abs() + PART_OF_NORMS * norms


@torch.inference_mode()
def run(trial: Trial, say: Callable[[str], None]) -> dict[str, Any]:
    worst = 0.0
    try:
        for shape in trial.shapes:
            say(f"prepare:experts {shape_name(shape)}")
            layer = Layer(*shape, trial.device)
            call = _cpu(layer, trial.kernel) if trial.device == "cpu" else _gpu(layer)
            for rows in trial.rows:
                place = f"{shape_name(shape)} with {rows} tokens"
                say(f"run:experts {place}")
                fault, error = _compared(trial, layer, call, rows, place)
                worst = max(worst, error)
                if fault:
                    return outcome(fault, worst)
    except Refused as why:
        return {"verdict": "refused", "detail": str(why)}
    return outcome("", worst, ran="nibble")


def _compared(trial: Trial, layer: Layer, call: Call, rows: int, place: str) -> tuple[str, float]:
    """The fault, empty if the sum is right, and the error."""
    x = activations(rows, layer.hidden, trial.device)
    weights, ids = _routing(rows, trial.device)
    y = with_fault(lambda x: call(x, weights, ids), trial.plant)(x)
    if not y.isfinite().all():
        return f"{place}: NaN or infinity", float("inf")
    return judge(y.double(), *layer.right(x, weights, ids), LIMIT, place)


def _routing(rows: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(rows, EXPERTS, generator=generator)
    weights, ids = scores.softmax(-1).topk(TOPK, dim=-1)
    return weights.to(device), ids.to(torch.int32).to(device)


def _gpu(layer: Layer) -> Call:
    from nibble_kernels import implementations
    from nibble_kernels.nvfp4_linear.weight import wants_native
    from nibble_kernels.nvfp4_moe.gpu import nvfp4_weight_moe, prepare_experts

    if (state := implementations().get("cuda", "")) != "compiled":
        raise Refused(f"nibble-kernels: CUDA kernels are {state or 'not compiled'}")
    native = wants_native(torch.bfloat16, layer.factors.device)
    w13, w2 = (
        prepare_experts(codes, scales, layer.factors, native)
        for codes, scales in zip(layer.codes, layer.scales, strict=True)
    )
    return lambda x, weights, ids: nvfp4_weight_moe(x, weights, ids, w13, w2)


def _cpu(layer: Layer, kernel: str) -> Call:
    from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level
    from nibble_kernels.nvfp4_moe.packed import nvfp4_packed_moe, pack_experts

    level = kernel.split(":")[1]
    if level not in cpu_levels():
        raise Refused(f"this processor has no {level}, or nibble-kernels was not compiled")
    use_cpu_level(level)
    w13, w2 = (
        pack_experts(codes.clone(), scales.clone())
        for codes, scales in zip(layer.codes, layer.scales, strict=True)
    )
    gate_up = layer.factors[:, None].expand(-1, 2).contiguous()
    return lambda x, weights, ids: nvfp4_packed_moe(
        x, weights, ids, *w13, gate_up, *w2, layer.factors, "silu"
    )
