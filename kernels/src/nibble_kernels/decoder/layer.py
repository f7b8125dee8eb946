"""The tensors of a decoder layer, in the order of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nibble_kernels.nvfp4_linear.packed import PackedWeight


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    queries: int  # heads
    keys: int  # heads
    head_size: int
    epsilon: float  # of all norms
    scale: float  # of the attention's scores

    @property
    def qkv_width(self) -> int:
        return (self.queries + 2 * self.keys) * self.head_size


class Product(NamedTuple):
    """What nvfp4_packed_linear takes. W4A4 with input_scale_inv, else W4A16."""

    weight: PackedWeight
    global_scale: Tensor
    column_scale: Tensor | None = None
    bias: Tensor | None = None
    input_scale_inv: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        yield from self.weight[:2]
        yield self.global_scale
        for optional in (self.column_scale, self.bias, self.input_scale_inv):
            yield torch.empty(0) if optional is None else optional


class DecoderLayer(NamedTuple):
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    input_norm: Tensor
    output_norm: Tensor  # after the attention
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        for product in (self.qkv, self.output, self.gate_up, self.down):
            yield from product.tensors()
        for norm in (self.input_norm, self.output_norm, self.query_norm, self.key_norm):
            yield torch.empty(0) if norm is None else norm
