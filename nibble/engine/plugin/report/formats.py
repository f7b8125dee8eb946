"""Where ModelOpt's and compressed-tensors' layers keep codes and scales before repacking, and
random data for them.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from nibble_kernels.nvfp4_moe import activation_of
from torch import Tensor

NVFP4_RANGE = 6 * 448  # the largest activation is its scale times this
SIGMAS = 3.0  # random activations are normal, with the largest one this many deviations away


def codes_of(module: Any, weight: str) -> Tensor:
    """Two E2M1 codes a byte: of `weight`, `w13_weight` or `w2_weight`."""
    packed = getattr(module, f"{weight}_packed", None)
    return (packed if packed is not None else getattr(module, weight)).data


def global_scales(module: Any, of: str) -> Tensor | None:
    """Multipliers in float32 of `weight` or `input` (`w13_weight`, `w2_input`, ...) as stored;
    None where there are none.
    """
    multiplier = f"{of}_scale_2" if of.endswith("weight") else f"{of}_scale"
    stored = getattr(module, multiplier, None)
    if stored is not None:
        found = stored.data.float()
    elif (divisors := getattr(module, f"{of}_global_scale", None)) is not None:
        found = 1 / divisors.data.float()  # compressed-tensors
    else:
        return None
    if of.endswith("input") and found.isnan().any():
        return None  # vLLM makes room for them in weight-only layers, too (layers.mark_unloaded)
    return found


def activation_arguments(module: Any) -> tuple[Any, ...]:
    """function, gated, interleaved, limit, alpha, beta for nvfp4_moe/reference.py."""
    names = (f"swiglu_{name}" for name in ("limit", "alpha", "beta"))
    found = [
        (
            own
            if (own := getattr(module, name, None)) is not None
            else getattr(module.moe_config, name, None)
        )
        for name in names
    ]
    return tuple(activation_of(module.activation.value, *found))


def generator_of(name: str) -> torch.Generator:
    """The same numbers for the same layer in every start."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def random_input(name: str, rows: int, columns: int, largest_scale: Tensor | None) -> Tensor:
    """Normal numbers [rows, columns] in the model's dtype; as large as the layer's scale for
    activations was made for.
    """
    deviation = 1.0 if largest_scale is None else float(largest_scale) * NVFP4_RANGE / SIGMAS
    values = torch.randn(rows, columns, generator=generator_of(name), dtype=torch.float32)
    return (values * deviation).to(torch.get_default_dtype())


def random_routing(name: str, rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights that sum to 1 and ids [rows, top_k] of distinct experts."""
    logits = torch.randn(rows, experts, generator=generator_of(f"{name} routing"))
    weights, ids = logits.softmax(-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids.int()
