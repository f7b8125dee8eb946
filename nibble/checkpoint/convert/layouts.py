"""Translates NVFP4 between ModelOpt, compressed-tensors and Quartet II without rounding codes.

Global scales are multipliers, in compressed-tensors divisors: y = fl(1/x), the float32 nearest to
1/x. The reciprocal fl(1/y) is x again, or x's neighbour: with x in [1, 2), y is off by at most
2^-25, so 1/y by x^2 * 2^-25. That is less than half an ulp of x below sqrt(2) and less than one
above. No other float32 is nearer to 1/x, and a second conversion there and back changes nothing: of
x and y, one has its fraction below sqrt(2).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nibble.checkpoint.convert.config import Layout
from nibble.checkpoint.convert.files import Buffer, Read, tensor
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import Nvfp4Weight
from nibble.errors import ExitCode, NibbleError

GROUP_SIZE = 16
# (codes, block scales, scale of all, scale of activations)
LEAVES: Mapping[Layout, tuple[str, str, str, str]] = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
    "quartet-packed": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}
KV_LEAVES = {"k": "k_scale", "v": "v_scale"}


@dataclass(frozen=True)
class Relabel:
    """From one layout to another; `weights` by module. `keep_input_scales` writes W4A4."""

    weights: Mapping[str, Nvfp4Weight]
    source: Layout
    dest: Layout
    keep_input_scales: bool

    def outputs(self, info: TensorInfo) -> list[TensorInfo]:
        """The tensor that `info` becomes, or none."""
        weight, role = self._role(info)
        if weight is None:
            return [tensor(self._kv_name(info.name), info.dtype, info.shape)]
        if role == 3 and not self.keep_input_scales:
            return []
        name = f"{weight.module}.{LEAVES[self.dest][role]}"
        if role == 0:
            packed = self.dest != "quartet-packed"
            return [
                tensor(
                    name,
                    "U8" if packed else "F4",
                    (weight.rows, weight.columns // (2 if packed else 1)),
                )
            ]
        if role == 1:
            return [tensor(name, info.dtype, (weight.rows, weight.columns // GROUP_SIZE))]
        return [tensor(name, info.dtype, (1,) if self.dest == "compressed-tensors" else ())]

    def data(self, info: TensorInfo, read: Read) -> Iterator[Any]:
        """The bytes of `outputs`."""
        weight, role = self._role(info)
        if (
            weight is not None
            and role == 1
            and "quartet-packed" in (self.source, self.dest)
            and self.source != self.dest
        ):
            yield self._reordered(weight, read(0, info.nbytes))
        elif (
            weight is not None
            and role >= 2
            and "compressed-tensors" in (self.source, self.dest)
            and self.source != self.dest
        ):
            if role == 2 or self.keep_input_scales:
                yield reciprocal(read(0, info.nbytes))
        elif weight is None or role != 3 or self.keep_input_scales:
            yield read(0, info.nbytes)

    def _role(self, info: TensorInfo) -> tuple[Nvfp4Weight | None, int]:
        module, _, leaf = info.name.rpartition(".")
        weight = self.weights.get(module)
        if weight is None or leaf not in LEAVES[self.source]:
            return None, -1
        return weight, LEAVES[self.source].index(leaf)

    def _kv_name(self, name: str) -> str:
        """ModelOpt has `k_proj.k_scale`, compressed-tensors `k_scale` beside the projection."""
        for letter, leaf in KV_LEAVES.items():
            long, short = f".{letter}_proj.{leaf}", f".{leaf}"
            if self.dest == "compressed-tensors" and name.endswith(long):
                return name.removesuffix(long) + short
            if self.source == "compressed-tensors" and name.endswith(f".self_attn{short}"):
                return name.removesuffix(short) + long
        return name

    def _reordered(self, weight: Nvfp4Weight, scales: Buffer) -> Any:
        """Block scales from row-major to 128x4 tiles or back."""
        import torch
        from nibble_kernels.scale_layout import tile, untile

        rows, blocks = weight.rows, weight.columns // GROUP_SIZE
        stored = torch.frombuffer(scales, dtype=torch.uint8).view(rows, blocks)
        moved = tile(stored) if self.dest == "quartet-packed" else untile(stored, rows, blocks)
        return moved.contiguous().numpy().data


def reciprocal(scale: bytes | Buffer) -> bytes:
    """The float32 nearest to 1/x of a float32, both little-endian."""
    (value,) = struct.unpack("<f", scale)
    # Rounding the float64 quotient again is exact: 53 >= 2 * 24 + 2 bits
    return struct.pack("<f", 1.0 / value)


def check(weights: Mapping[str, Nvfp4Weight], dest: Layout, keep_input_scales: bool) -> None:
    """Raise CONFIG for what `dest` cannot hold, naming the tensor."""
    for weight in weights.values():
        if weight.experts:
            what = f"{weight.weight.name} stacks all experts of a layer"
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected="one tensor for each expert",
                action="convert another export of this model",
            )
        for one in (weight.global_scale, weight.input_scale if keep_input_scales else None):
            if one is not None and one.elements != 1:
                raise NibbleError(
                    ExitCode.CONFIG,
                    what=f"{one.name} has {one.elements} elements",
                    expected="one scale",
                    action="choose another source",
                )
        if dest == "quartet-packed":
            check_tiles(weight.weight.name, weight.rows, weight.columns)


def check_tiles(name: str, rows: int, columns: int) -> None:
    """Raise CONFIG for a weight `name` that quartet-packed cannot hold."""
    if rows % 128 or columns % 128:
        what = f"{name} is [{rows}, {columns}]"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="multiples of 128 for quartet-packed",
            action="choose another layout with --to",
        )
