"""NVFP4 rounding done in float: training sees the error that a later NVFP4 form of the model
will have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

GROUP_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_MIDPOINTS = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2


def fake_nvfp4(x: Tensor) -> Tensor:
    """Round `x` [..., K], K % 16 == 0, to NVFP4 and back, in float32, scaled by the tensor's own
    maximum.

    Ties go towards zero here, not to even; they have measure zero for what this is used for.
    """
    groups = x.detach().float().unflatten(-1, (-1, GROUP_SIZE))
    amax = groups.abs().amax(-1, keepdim=True)
    global_scale = (amax.amax() / (E2M1_MAX * E4M3_MAX)).clamp_min(1e-30)
    block_scale = (amax / E2M1_MAX / global_scale).to(torch.float8_e4m3fn).float() * global_scale
    # an all-zero group has scale 0: any divisor gives the zeros back
    codes = torch.bucketize(groups.abs() / block_scale.clamp_min(1e-30), E2M1_MIDPOINTS)
    return (E2M1_VALUES[codes] * block_scale * groups.sign()).flatten(-2)


def linears(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that an NVFP4 form quantizes: all but lm_head, which is the embedding. A
    router is none.
    """
    return [
        m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    ]


def experts(model: nn.Module) -> list[nn.Module]:
    """The experts of each MoE layer: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    return [
        m for m in model.modules() if isinstance(getattr(m, "gate_up_proj", None), nn.Parameter)
    ]


def quantized_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights that an NVFP4 form quantizes, [..., K]."""
    of_experts = [p for layer in experts(model) for p in (layer.gate_up_proj, layer.down_proj)]
    return [layer.weight for layer in linears(model)] + of_experts  # pyright: ignore


@contextmanager
def nvfp4_weights(model: nn.Module) -> Iterator[None]:
    """Within it the quantized weights are rounded to NVFP4; after it they are the masters again.

    A gradient taken inside is that of the rounded weights; applied to the masters it is the
    straight-through estimator.
    """
    weights = quantized_parameters(model)
    masters = [weight.data for weight in weights]
    for weight in weights:
        weight.data = fake_nvfp4(weight).to(weight.dtype)
    try:
        yield
    finally:
        for weight, master in zip(weights, masters, strict=True):
            weight.data = master


@contextmanager
def nvfp4_activations(model: nn.Module) -> Iterator[None]:
    """Within it the input of linear layers and of experts is rounded to NVFP4 (straight-through),
    as W4A4 does.

    What goes into an expert's down_proj is not: no module has it as its input.
    """

    def round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = args
        # What is added is zero, and has the gradient of x: a sum of x and the difference would be
        # rounded once more.
        return (fake_nvfp4(x).to(x.dtype) + (x - x.detach()), *others)

    hooks = [
        layer.register_forward_pre_hook(round_input) for layer in (*linears(model), *experts(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
