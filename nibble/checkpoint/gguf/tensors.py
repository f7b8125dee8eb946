"""The tensors of a GGUF model as those of a Hugging Face checkpoint in BF16.

A tensor is dequantized in float32 when it is read, and rounded once, to BF16: what nibble quantizes
is then bit for bit the BF16 model that the file stands for, and calibration, a reference and the
unquantized layers see the same numbers. NVFP4's own error is about 30 times larger than that
rounding. Chunks are in memory in float32, one tensor in BF16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.checkpoint.gguf.families import OUTSIDE_LAYERS, Config, Family
from nibble.checkpoint.gguf.file import GgufFile
from nibble.checkpoint.gguf.keys import shape_of
from nibble.checkpoint.gguf.rope import ROPE_FACTORS
from nibble.checkpoint.headers import TensorInfo
from nibble.errors import ExitCode, NibbleError

BF16_BYTES = 2
CHUNK_ELEMENTS = 1 << 17  # fits the cache of a core, with what numpy makes between
SHARD_BYTES = 16 << 30  # of BF16, about 4.5 GB of NVFP4
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Stored:
    """Where a tensor's values are: a tensor of the file, or one expert of it.

    `path` is the file. `interleaved_heads`: its rows are those of so many heads, with RoPE pairs
    side by side; 0 for none. `minus`: what to subtract.
    """

    tensor: Any
    expert: int | None = None
    interleaved_heads: int = 0
    minus: float = 0.0
    path: Path = Path()


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix's blocks in a file: their type, number of bytes, place and order of rows."""

    kind: str
    nbytes: int
    path: Path
    offset: int
    interleaved_heads: int = 0


def stored_tensors(file: GgufFile, family: Family, config: Config) -> dict[str, Stored]:
    """Every tensor by its name in Hugging Face's format.

    Raises CONFIG for a tensor without a place there, or of a type that cannot be read.
    """
    found: dict[str, Stored] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        _check_type(file, name, tensor)
        for hf_name, expert in _names(file, family, name, tensor):
            found[hf_name] = Stored(
                tensor,
                expert,
                _heads(family, config, hf_name),
                _offset(family, hf_name),
                file.places[name],
            )
    return found


def _names(
    file: GgufFile, family: Family, name: str, tensor: Any
) -> Iterator[tuple[str, int | None]]:
    """Names in Hugging Face's format, for stacked experts one for each."""
    outside, _, leaf = name.rpartition(".")
    layer = _LAYER_NAME.fullmatch(name)
    place = family.layer.get(layer[2]) if layer else None
    if outside in OUTSIDE_LAYERS and leaf == "weight":
        yield f"{OUTSIDE_LAYERS[outside]}.weight", None
    elif layer and place and "{}" in place:
        for expert in range(shape_of(tensor)[0]):
            yield f"model.layers.{layer[1]}.{place.format(expert)}.{layer[3]}", expert
    elif layer and place:
        yield f"model.layers.{layer[1]}.{place}.{layer[3]}", None
    else:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{file.path} has the tensor {name}, for which {family.architecture} has no place",
            expected=f"the tensors that llama.cpp writes for {file.architecture}",
            action="convert another GGUF file of this model",
        )


def _check_type(file: GgufFile, name: str, tensor: Any) -> None:
    import numpy
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = tensor.tensor_type
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:  # the library has no list of the types that it dequantizes
        dequantize(numpy.zeros((1, block_bytes), numpy.uint8), kind)
    except NotImplementedError:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{file.path} has {name} in {kind.name}, which cannot be dequantized",
            expected="F32, F16, BF16, Q4_0 to Q8_0, a K-quant or an I-quant",
            action="convert another GGUF file of this model",
        ) from None


def _heads(family: Family, config: Config, name: str) -> int:
    if not family.interleaved:
        return 0
    if ".self_attn.q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".self_attn.k_proj." in name else 0


def _offset(family: Family, name: str) -> float:
    return family.norm_offset if name.endswith("norm.weight") else 0.0


def infos(stored: Mapping[str, Stored]) -> dict[str, TensorInfo]:
    """What headers of safetensors files with these tensors would say."""
    shapes = {name: _shape(name, one) for name, one in stored.items()}
    sizes = {name: math.prod(shape) * BF16_BYTES for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    found: dict[str, TensorInfo] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        offset = 0
        for name in names:
            file = shard if len(shards) > 1 else "model.safetensors"
            found[name] = TensorInfo(name, "BF16", shapes[name], sizes[name], file, offset)
            offset += sizes[name]
    return found


def _shape(name: str, one: Stored) -> tuple[int, ...]:
    shape = shape_of(one.tensor)[1:] if one.expert is not None else shape_of(one.tensor)
    # llama.cpp stores the one row of the shared expert's gate as a vector
    return (1, *shape) if name.endswith("shared_expert_gate.weight") and len(shape) == 1 else shape


def values(
    stored: Mapping[str, Stored],
) -> Callable[[TensorInfo], Callable[[int, int], memoryview]]:
    """A function that gives the reader of a tensor's BF16 bytes."""

    def of(info: TensorInfo) -> Callable[[int, int], memoryview]:
        def read(first: int, count: int) -> memoryview:
            return bf16(stored[info.name], first, count)

        return read

    return of


def blocks(stored: Mapping[str, Stored]) -> Callable[[TensorInfo], StoredBlocks | None]:
    """A function that says how a matrix is stored, where nibble_kernels quantizes it from there."""

    def of(info: TensorInfo) -> StoredBlocks | None:
        from nibble_kernels.gguf_blocks import BLOCKS

        one = stored[info.name]
        kind = one.tensor.tensor_type.name
        if kind not in BLOCKS or one.minus or len(info.shape) != 2:
            return None
        elements, block_bytes = BLOCKS[kind]
        if info.shape[1] % elements:
            return None
        nbytes = math.prod(info.shape) // elements * block_bytes
        offset = int(one.tensor.data_offset) + (one.expert or 0) * nbytes
        return StoredBlocks(kind, nbytes, one.path, offset, one.interleaved_heads)

    return of


def bf16(one: Stored, first: int, count: int) -> memoryview:
    """`count` bytes of a tensor's values in BF16, row by row.

    numpy asks Linux for huge pages: 12 layers of a 7B model convert in 10.2 s instead of 12.5 s.
    """
    import numpy
    import torch
    from gguf import GGML_QUANT_SIZES
    from nibble_kernels.gguf_blocks import BLOCKS, gguf_to_bfloat16

    kind = one.tensor.tensor_type
    elements, block_bytes = GGML_QUANT_SIZES[kind]
    raw = one.tensor.data if one.expert is None else one.tensor.data[one.expert]
    raw = numpy.ascontiguousarray(raw).reshape(-1).view(numpy.uint8)
    if not one.interleaved_heads:  # whole blocks that have these values
        block = elements * BF16_BYTES
        raw = raw[first // block * block_bytes : -(-(first + count) // block) * block_bytes]
        first %= block
    size = len(raw) // block_bytes * elements * BF16_BYTES
    data = numpy.empty(size, numpy.uint8).data
    result = torch.frombuffer(data, dtype=torch.bfloat16)
    is_ours = kind.name in BLOCKS and not one.minus
    step = CHUNK_ELEMENTS // elements * block_bytes
    for begin in range(0, len(raw), step):
        # A copy, because torch warns of the file's mapping, which cannot be written to
        chunk = torch.from_numpy(raw[begin : begin + step].copy())
        at = begin // block_bytes * elements
        values = gguf_to_bfloat16(chunk, kind.name) if is_ours else _float32(chunk, kind)
        result[at : at + len(values)] = values - one.minus if one.minus else values
    if one.interleaved_heads:
        rows = shape_of(one.tensor)[0]
        pairs = result.view(one.interleaved_heads, rows // one.interleaved_heads // 2, 2, -1)
        result.copy_(pairs.transpose(1, 2).reshape(result.shape))
    return data[first : first + count]


def _float32(blocks: Any, kind: Any) -> Any:
    """Values of a type that nibble_kernels lacks, by the library gguf."""
    import numpy
    import torch
    from gguf.quants import dequantize

    if kind.name == "BF16":
        return blocks.view(torch.bfloat16).float()
    if kind.name == "F16":
        return blocks.view(torch.float16).float()
    with numpy.errstate(all="ignore"):  # values that are not finite are refused by their name
        # As one row: the library loops over groups of 16 rows, which takes three times as long
        row = dequantize(blocks.numpy().reshape(1, -1), kind)
        return torch.from_numpy(row.astype(numpy.float32).reshape(-1))
