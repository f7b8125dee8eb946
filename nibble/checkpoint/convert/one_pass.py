"""Rounding that reads each tensor once: layers that share a scale are in memory together.

A matrix is quantized from its stored form, row by row. Its largest magnitude sets the scale of all
layers that vLLM fuses with it, so it is measured in memory and not in a pass over the file before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nibble.checkpoint.convert.ahead import AHEAD_BYTES, ahead
from nibble.checkpoint.convert.files import Buffer, Read, in_files, read_into
from nibble.checkpoint.convert.memory import Memory
from nibble.checkpoint.convert.original import Original, counter
from nibble.checkpoint.convert.quantize import (
    GROUP_SIZE,
    Amax,
    CacheScales,
    Encode,
    Part,
    Quantization,
    finite,
    group,
    largest_of,
    rounding,
)
from nibble.checkpoint.convert.wishes import Wishes
from nibble.checkpoint.gguf.tensors import StoredBlocks
from nibble.checkpoint.headers import TensorInfo
from nibble.hub.progress import OnProgress

PIECE_BYTES = 4 << 20

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
        model: Original,
        on_progress: OnProgress,
        wishes: Wishes,
        input_scales: Mapping[str, float],
        cache_scales: CacheScales,
    ) -> None:
        self._parts, self._model, self._wishes = parts, model, wishes
        self._input_scales, self._cache_scales = input_scales, cache_scales
        self._count = counter("quantize", model.found.tensors.values(), on_progress)
        self._memory = Memory()

    def outputs(self, info: TensorInfo) -> list[TensorInfo]:
        """The tensors that a stored tensor becomes."""
        return self._conversion(rounding({}, False)).outputs(info)

    def _conversion(self, encode: Encode) -> Quantization:
        return Quantization(self._parts, encode, self._input_scales, self._cache_scales)

    def of_file(self, inside: Sequence[TensorInfo]) -> Iterator[list[Any]]:
        """The bytes of the new tensors, for each tensor of a file."""
        for made, used in ahead(batches(inside, self._parts), self._make, _nbytes):
            yield from made
            self._memory.give(used)  # written now

    def _make(self, batch: Sequence[TensorInfo]) -> tuple[list[list[Any]], list[Any]]:
        """What each tensor becomes, and the memory that holds it."""
        held = {info.name: self._read(info) for info in batch}
        amax: Amax = {}
        for info in batch:
            for part in self._parts.get(info.name, ()):
                largest = held[info.name].largest(part)
                amax[part.module] = finite(self._model.found.where, part, largest)
        amax = self._wishes.share_scales(amax)
        made, used = [], []
        for info in batch:
            one = held[info.name]
            conversion = self._conversion(one.encoder(amax, self._wishes.four_over_six, used))
            made.append(list(conversion.data(info, one.read)))
            one.release()
        return made, used

    def _read(self, info: TensorInfo) -> _Kept | _Values | _Blocks:
        if info.name not in self._parts:
            return _Kept(self._model.values(info), self._count)
        stored = self._model.blocks(info)
        held: _Values | _Blocks
        if stored is None:
            held = _Values(info, self._model.values(info)(0, info.nbytes))
        else:
            held = _Blocks(stored, self._memory)
        self._count(info.nbytes)
        return held


class _Kept:
    """A tensor that is not quantized. It is read in pieces while it is written: embeddings are
    large, and new pages of memory take longer than their values.
    """

    def __init__(self, values: Read, count: Callable[[int], None]) -> None:
        self._values, self._count = values, count

    def read(self, first: int, count: int) -> Any:
        """An iterator, which `rewrite` takes instead of bytes."""
        for begin in range(first, first + count, PIECE_BYTES):
            size = min(PIECE_BYTES, first + count - begin)
            yield self._values(begin, size)
            self._count(size)

    def largest(self, part: Part) -> float:
        raise AssertionError("it has no part")

    def encoder(self, amax: Amax, four_over_six: bool, _used: list[Any]) -> Encode:
        return rounding(amax, four_over_six)

    def release(self) -> None:
        pass


class _Values:
    """A tensor in memory, in its type."""

    def __init__(self, info: TensorInfo, data: Buffer) -> None:
        self._dtype, self._data = info.dtype, data

    def read(self, first: int, count: int) -> Buffer:
        data = self._data
        return data if count == len(data) else data[first : first + count]

    def largest(self, part: Part) -> float:
        return largest_of(part, self._dtype, self.read)

    def encoder(self, amax: Amax, four_over_six: bool, _used: list[Any]) -> Encode:
        return rounding(amax, four_over_six)

    def release(self) -> None:
        pass


class _Blocks:
    """A tensor in memory as it is stored. An operator quantizes it from there."""

    def __init__(self, stored: StoredBlocks, memory: Memory) -> None:
        self._kind, self._heads, self._memory = stored.kind, stored.interleaved_heads, memory
        self._data = memory.take(stored.nbytes)
        read_into(stored, self._data)

    def read(self, first: int, count: int) -> Buffer:
        raise AssertionError("its encoder needs no values")

    def _blocks(self, part: Part) -> Any:
        import torch
        from nibble_kernels.gguf_blocks import BLOCKS

        elements, block_bytes = BLOCKS[self._kind]
        begin = part.first // elements * block_bytes
        size = part.rows * part.columns // elements * block_bytes
        return torch.from_numpy(self._data)[begin : begin + size]

    def largest(self, part: Part) -> float:
        from nibble_kernels.gguf_blocks import gguf_largest_magnitude

        return float(gguf_largest_magnitude(self._blocks(part), self._kind))

    def encoder(self, amax: Amax, four_over_six: bool, used: list[Any]) -> Encode:
        """Quantizes into memory that it adds to `used`."""

        def encode(part: Part, _dtype: str, _read: Read) -> tuple[Any, Any, Any]:
            import torch
            from nibble_kernels.gguf_blocks import gguf_to_nvfp4

            packed = self._memory.take(part.rows * part.columns // 2)
            scales = self._memory.take(part.rows * part.columns // GROUP_SIZE)
            used.extend((packed, scales))
            scale = gguf_to_nvfp4(
                self._blocks(part),
                self._kind,
                torch.tensor(amax[part.module]),
                torch.from_numpy(packed).view(part.rows, -1),
                torch.from_numpy(scales).view(torch.float8_e4m3fn).view(part.rows, -1),
                four_over_six=four_over_six,
                interleaved_heads=self._heads,
            )
            return packed.data, scales.data, scale.numpy().tobytes()

        return encode

    def release(self) -> None:
        self._memory.give([self._data])


def _nbytes(batch: Iterable[TensorInfo]) -> int:
    return sum(info.nbytes for info in batch)
