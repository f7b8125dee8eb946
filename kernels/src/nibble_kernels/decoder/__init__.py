"""nibble::decoder_…: a dense decoder's layers with packed NVFP4 products (Llama, Qwen2, Qwen3).

`Decoder` holds the tensors of all layers. It computes a layer in two parts, before and after the
attention, or a whole step with new tokens for each sequence. `reference.py` is the formula.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from nibble_kernels.decoder import reference
from nibble_kernels.decoder.layer import DecoderLayer, Product, Shape
from nibble_kernels.library import operator

__all__ = ["Decoder", "DecoderLayer", "Product", "Shape"]

_new = operator(
    "decoder_new(Tensor[] tensors, int layers, int hidden, int intermediate, int queries, int keys,"
    " int head_size, float epsilon, float scale) -> int",
    reference.new,
    lambda *_: 0,
)
_delete = operator(
    "decoder_delete(Tensor like, int decoder) -> ()", reference.delete, lambda like, decoder: None
)
_before_attention = operator(
    "decoder_before_attention(int decoder, int layer, Tensor? hidden, Tensor(a!) residual, Tensor"
    " positions) -> Tensor",
    reference.before_attention,
    lambda decoder, layer, hidden, residual, positions: residual.new_empty(
        len(residual), reference.shape_of(decoder).qkv_width
    ),
)
_after_attention = operator(
    "decoder_after_attention(int decoder, int layer, Tensor attention, Tensor(a!) residual) ->"
    " Tensor",
    reference.after_attention,
    lambda decoder, layer, attention, residual: torch.empty_like(residual),
)
_last_norm = operator(
    "decoder_last_norm(int decoder, Tensor hidden, Tensor(a!) residual) -> Tensor",
    reference.last_norm,
    lambda decoder, hidden, residual: torch.empty_like(residual),
)
_step = operator(
    "decoder_step(int decoder, Tensor(a!) residual, Tensor positions, Tensor(b!)[] caches, Tensor"
    " slots, Tensor blocks, Tensor lengths, int window, Tensor? starts) -> Tensor",
    reference.step,
    lambda decoder, residual, *_: torch.empty_like(residual),
)


@dataclass(frozen=True)
class _Number:
    """A decoder in the operators' list, until it is deleted."""

    value: int

    def __del__(self) -> None:
        if not sys.is_finalizing():  # torch's operators may be gone
            _delete(torch.empty(0), self.value)


class Decoder:
    """The layers of a model and its last norm.

    cos_sin: bfloat16 [positions, rotated columns], cosines before sines. Raises RuntimeError where
    a tensor's type or shape does not fit.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], last_norm: Tensor, cos_sin: Tensor, shape: Shape
    ) -> None:
        tensors = [*chain.from_iterable(layer.tensors() for layer in layers), last_norm, cos_sin]
        sizes = (shape.hidden, shape.intermediate, shape.queries, shape.keys, shape.head_size)
        number = _new(tensors, len(layers), *sizes, shape.epsilon, shape.scale)
        self._number = _Number(number)
        self.shape = shape
        reference.remember_shape(number, shape)

    def before_attention(
        self, layer: int, hidden: Tensor | None, residual: Tensor, positions: Tensor
    ) -> Tensor:
        """Queries, keys and values of each row, side by side: bfloat16 [rows, qkv_width].

        Adds `hidden`, the result of the layer before, to `residual`. `positions`: int64 [rows].
        """
        return _before_attention(self._number.value, layer, hidden, residual, positions)

    def after_attention(self, layer: int, attention: Tensor, residual: Tensor) -> Tensor:
        """The layer's result. Adds the attention's to `residual`."""
        return _after_attention(self._number.value, layer, attention, residual)

    def last_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return _last_norm(self._number.value, hidden, residual)

    def step(
        self,
        residual: Tensor,
        positions: Tensor,
        caches: list[Tensor],
        slots: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        window: int = 0,
        starts: Tensor | None = None,
    ) -> Tensor:
        """All layers and the last norm, for new tokens of each sequence. Overwrites `residual`, the
        tokens' embeddings.

        caches: one a layer, bfloat16 [blocks, key heads, tokens of a block, 2 * head size]; a block
        has a head's keys by column, [head size, tokens], and then its values, [tokens, head size].
        slots: int64, where the tokens' keys and values go, -1 for nowhere; blocks: int32
        [sequences, any number]; lengths: int32, with the new tokens; window: tokens that a query
        sees, 0 for all; starts: int32 [sequences + 1], each sequence's first row and the number of
        rows, or None where each has one row.
        """
        given = (caches, slots, blocks, lengths, window, starts)
        return _step(self._number.value, residual, positions, *given)
