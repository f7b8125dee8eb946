"""Rounding that reads each tensor once: layers that share a scale are in memory together.

A tensor of a GGUF file costs as much to dequantize as to quantize. So its largest magnitude, which
sets the scale of all layers that vLLM fuses with it, is not measured in a pass before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nibble.checkpoint.convert.ahead import AHEAD_BYTES, ahead
from nibble.checkpoint.convert.files import Buffer, Read, Values, in_files
from nibble.checkpoint.convert.quantize import (
    Amax,
    CacheScales,
    Encode,
    Part,
    Quantization,
    group,
    largest_of,
    rounding,
)
from nibble.checkpoint.convert.wishes import Wishes
from nibble.checkpoint.headers import TensorInfo

Parts = Mapping[str, tuple[Part, ...]]


def batches(inside: Sequence[TensorInfo], parts: Parts) -> list[list[TensorInfo]]:
    """The tensors of a file, in their order, cut wherever no group of fused layers is open."""
    last = {name: at for at, info in enumerate(inside) for name in _groups(info, parts)}
    found: list[list[TensorInfo]] = [[]]
    open_until = -1
    for at, info in enumerate(inside):
        if at > open_until and found[-1]:
            found.append([])
        found[-1].append(info)
        open_until = max([open_until, *(last[name] for name in _groups(info, parts))])
    return [batch for batch in found if batch]


def fits(tensors: Mapping[str, TensorInfo], parts: Parts) -> bool:
    """Whether every group is in one file, and its batch within the memory of a conversion."""
    seen: set[str] = set()
    for inside in in_files(tensors).values():
        here = {name for info in inside for name in _groups(info, parts)}
        if seen & here:
            return False
        seen |= here
        for batch in batches(inside, parts):
            if _nbytes(batch) > AHEAD_BYTES:
                return False
    return True


def _groups(info: TensorInfo, parts: Parts) -> Iterable[str]:
    return {group(part.module) for part in parts.get(info.name, ())}


class OnePass:
    """Computes what tensors become, several batches at a time."""

    def __init__(
        self,
        parts: Parts,
        values: Values,
        where: str,
        wishes: Wishes,
        input_scales: Mapping[str, float],
        cache_scales: CacheScales,
    ) -> None:
        self._parts, self._values, self._where = parts, values, where
        self._wishes, self._input_scales = wishes, input_scales
        self._cache_scales = cache_scales

    def outputs(self, info: TensorInfo) -> list[TensorInfo]:
        """The tensors that a stored tensor becomes."""
        return self._conversion(rounding({}, False)).outputs(info)

    def _conversion(self, encode: Encode) -> Quantization:
        return Quantization(self._parts, encode, self._input_scales, self._cache_scales)

    def of_file(self, inside: Sequence[TensorInfo]) -> Iterator[list[Any]]:
        """The bytes of the new tensors, for each tensor of a file."""
        for made in ahead(batches(inside, self._parts), self._make, _nbytes):
            yield from made

    def _make(self, batch: Sequence[TensorInfo]) -> list[list[Any]]:
        held = {info.name: self._values(info)(0, info.nbytes) for info in batch}
        amax: Amax = {}
        for info in batch:
            if info.name in self._parts:
                read = _reader(held[info.name])
                amax |= largest_of(self._where, self._parts[info.name], info.dtype, read)
        encode = rounding(self._wishes.share_scales(amax), self._wishes.four_over_six)
        conversion = self._conversion(encode)
        return [list(conversion.data(info, _reader(held[info.name]))) for info in batch]


def _nbytes(batch: Iterable[TensorInfo]) -> int:
    return sum(info.nbytes for info in batch)


def _reader(data: Buffer) -> Read:
    return lambda first, count: data if count == len(data) else data[first : first + count]
