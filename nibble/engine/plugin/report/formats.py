"""Reads codes and scales from layers of ModelOpt and compressed-tensors before vLLM repacks them,
and makes random inputs for these layers.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from nibble_kernels.nvfp4_moe import activation_of
from torch import Tensor

from nibble.engine.plugin.experts import swiglu

NVFP4_RANGE, FP8_RANGE = 6 * 448, 448  # the largest activation is its scale times this
SIGMAS = 3.0  # random activations reach the range at this many standard deviations


def codes_of(module: Any, weight: str) -> Tensor:
    """The codes of `weight`, `w13_weight` or `w2_weight`: two E2M1 codes per byte."""
    packed = getattr(module, f"{weight}_packed", None)
    return (packed if packed is not None else getattr(module, weight)).data


def global_scales(module: Any, of: str) -> Tensor | None:
    """The global scales of `weight` or `input` (`w13_weight`, `w2_input`, ...) as multipliers.

    float32 in the stored shape; None if the layer has none.
    """
    multiplier = f"{of}_scale_2" if of.endswith("weight") else f"{of}_scale"
    stored = getattr(module, multiplier, None)
    if stored is not None:
        scales = stored.data.float()
    elif (divisors := getattr(module, f"{of}_global_scale", None)) is not None:
        scales = 1 / divisors.data.float()  # compressed-tensors
    else:
        return None
    if of.endswith("input") and scales.isnan().any():
        return None  # vLLM also creates them in weight-only layers; see layers.mark_unloaded
    return scales


def activation_arguments(module: Any) -> tuple[Any, ...]:
    """function, gated, interleaved, limit, alpha and beta for nvfp4_moe/reference.py."""
    parameters = (swiglu(module, module.moe_config, name) for name in ("limit", "alpha", "beta"))
    return tuple(activation_of(module.activation.value, *parameters))


def generator_of(name: str) -> torch.Generator:
    """A random generator with a seed from the name of the layer, so that starts are repeatable."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def random_input(
    name: str,
    rows: int,
    columns: int,
    largest_scale: Tensor | None,
    of_scale: float = NVFP4_RANGE,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normally distributed numbers [rows, columns]. dtype: the model's; None is torch's default,
    which is the model's only while vLLM loads it.

    largest_scale: the layer's input scale, whose range, `of_scale` times it, the numbers fill;
    None: deviation 1.
    """
    deviation = 1.0 if largest_scale is None else float(largest_scale) * of_scale / SIGMAS
    values = torch.randn(rows, columns, generator=generator_of(name), dtype=torch.float32)
    return (values * deviation).to(dtype or torch.get_default_dtype())


def random_routing(name: str, rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Random weights that sum to 1, and ids of distinct experts, both [rows, top_k]."""
    logits = torch.randn(rows, experts, generator=generator_of(f"{name} routing"))
    weights, ids = logits.softmax(-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids.int()
