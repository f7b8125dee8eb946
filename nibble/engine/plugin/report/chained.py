"""Compares operators that compute a norm and the products after it with the norm and the products
one by one, whose layers are compared with their definition elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nibble.engine.plugin.chain_layers import ChainedLayer
from nibble.engine.plugin.report.compare import Result, compare
from nibble.engine.plugin.report.formats import random_input

KIND = "norm and products in one"
ROWS = (1, 12, 24, 48, 100)  # one of each kernel
# Of the stream and of attention's result, so that the sum with the MLP's result is that result.
SMALL = 2.0**-8


def chained_layers(model: nn.Module) -> Iterator[tuple[str, ChainedLayer]]:
    """One of the layers of each size: they differ in their weights alone."""
    seen = set[tuple[Any, ...]]()
    for name, module in model.named_modules():
        if not isinstance(module, ChainedLayer):
            continue
        parts = (module.self_attn.qkv_proj, module.mlp.gate_up_proj, module.mlp.down_proj)
        size = tuple(tuple(part.layer.weight.shape) for part in parts if hasattr(part, "layer"))
        if (module.fuses_qkv or module.fuses_mlp) and size not in seen:
            seen.add(size)
            yield name, module


def chained_results(name: str, layer: ChainedLayer, device: torch.device) -> Iterator[Result]:
    """Of a layer, for each number of rows in ROWS."""
    weight = layer.input_layernorm.weight

    def small_input(columns: int) -> Tensor:
        rows = random_input(name, max(ROWS), columns, None, dtype=weight.dtype)
        return rows.to(device) * SMALL

    everything, attention, mlp = small_input(len(weight)), layer.self_attn, layer.mlp
    attended = small_input(attention.o_proj.layer.input_size)

    def compared(part: str, y: Tensor, expected: Tensor) -> Result:
        return compare("linear", KIND, f"{name}, {part}", y, {"bf16": expected.float().cpu()})

    for count in ROWS:
        x = everything[:count]
        if layer.fuses_qkv:
            expected, _ = attention.qkv_proj.layer(layer.input_layernorm(x))
            yield compared("qkv_proj", layer.normed_qkv(x), expected)
        if layer.fuses_mlp:
            between, _ = mlp.gate_up_proj(layer.post_attention_layernorm(x))
            expected = mlp.down_proj.added_to(torch.zeros_like(x), between)
            yield compared("mlp", layer.with_mlp(x) - x, expected)
        for following in layer.following:
            stream, qkv = layer.up_to_next_attention(x, attended[:count])
            middle = attention.o_proj.added_to(x, attended[:count])
            between, _ = mlp.gate_up_proj(layer.post_attention_layernorm(middle))
            expected = mlp.down_proj.added_to(middle, between)
            yield compared("o_proj to down_proj", stream, expected)
            expected, _ = following.self_attn.qkv_proj.layer(following.input_layernorm(expected))
            yield compared("o_proj to the next qkv_proj", qkv, expected)
