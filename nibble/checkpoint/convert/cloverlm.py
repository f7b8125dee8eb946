"""Packs BF16 CloverLM with the codes, scales and G that nibble's plugin computes at load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nibble.checkpoint.convert.files import Read, tensor
from nibble.checkpoint.convert.layouts import check_tiles
from nibble.checkpoint.convert.quantize import GROUP_SIZE, Part, weight_of
from nibble.checkpoint.headers import TensorInfo


@dataclass(frozen=True)
class Packing:
    """The weights to pack by tensor name, and each one's largest magnitude by module."""

    parts: Mapping[str, Part]
    amax: Mapping[str, float]

    def outputs(self, info: TensorInfo) -> list[TensorInfo]:
        """The tensors that a stored tensor becomes."""
        part = self.parts.get(info.name)
        if part is None:
            return [info]
        check_tiles(info.name, part.rows, part.columns)
        return [
            tensor(info.name, "F4", (part.rows, part.columns)),
            tensor(f"{info.name}_scale", "F8_E4M3", (part.rows, part.columns // GROUP_SIZE)),
            tensor(f"{info.name}_scale_2", "F32", ()),
        ]

    def data(self, info: TensorInfo, read: Read) -> Iterator[Any]:
        """The bytes of `outputs`."""
        import torch
        from nibble_kernels.quartet2.quantize import quant_fp4

        part = self.parts.get(info.name)
        if part is None:
            yield read(0, info.nbytes)
            return
        weight, amax = weight_of(part, info.dtype, read), torch.tensor(self.amax[part.module])
        codes, scales, g = quant_fp4(weight, amax, four_over_six=True)
        yield codes.numpy().data
        yield scales.view(torch.uint8).numpy().data
        yield g.numpy().tobytes()
