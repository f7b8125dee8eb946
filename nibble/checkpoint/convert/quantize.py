"""BF16 to NVFP4: selects weights, groups those with a common global scale, writes their tensors."""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from nibble.checkpoint.convert.ahead import ahead
from nibble.checkpoint.convert.files import Read, Values, tensor
from nibble.checkpoint.fused_groups import FUSED, fused_layer
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import STACKED_EXPERTS
from nibble.checkpoint.weights import kind_of
from nibble.errors import ExitCode, NibbleError

GROUP_SIZE = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# ModelOpt's default recipes also skip lm_head, embeddings, routers, norms, vision and draft.
QUANTIZED_KINDS = ("attention", "linear_attention", "mlp", "moe_experts", "shared_experts")

Amax = dict[str, float]
# By the name of a stored tensor: the scale of the cache that its output goes to, as (name, value).
CacheScales = Mapping[str, tuple[str, float]]
ShareScales = Callable[[Amax], Amax]


@dataclass(frozen=True)
class Part:
    """A linear layer [N, K] to quantize, `first` elements into a stored tensor."""

    module: str
    rows: int
    columns: int
    first: int = 0


# A layer, the type that it is stored in and its reader -> bytes of codes, block scales and scale.
Encode = Callable[[Part, str, Read], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Quantization:
    """What to write: `encode` quantizes a layer; `input_scales` by module (empty: W4A16)."""

    parts: Mapping[str, tuple[Part, ...]]  # by the name of the stored tensor
    encode: Encode
    input_scales: Mapping[str, float]
    cache_scales: CacheScales

    def outputs(self, info: TensorInfo) -> list[TensorInfo]:
        """The tensors that a stored tensor becomes."""
        found = [] if info.name in self.parts else [info]
        for part in self.parts.get(info.name, ()):
            found += [
                tensor(f"{part.module}.weight", "U8", (part.rows, part.columns // 2)),
                tensor(
                    f"{part.module}.weight_scale",
                    "F8_E4M3",
                    (part.rows, part.columns // GROUP_SIZE),
                ),
                tensor(f"{part.module}.weight_scale_2", "F32", ()),
            ]
            if self.input_scales:
                found.append(tensor(f"{part.module}.input_scale", "F32", ()))
        if info.name in self.cache_scales:
            found.append(tensor(self.cache_scales[info.name][0], "F32", ()))
        return found

    def data(self, info: TensorInfo, read: Read) -> Iterator[Any]:
        """The bytes of `outputs`."""
        if info.name not in self.parts:
            yield read(0, info.nbytes)
        for part in self.parts.get(info.name, ()):
            yield from self.encode(part, info.dtype, read)
            if self.input_scales:
                yield struct.pack("<f", self.input_scales[part.module])
        if info.name in self.cache_scales:
            yield struct.pack("<f", self.cache_scales[info.name][1])


def rounding(amax: Mapping[str, float], four_over_six: bool) -> Encode:
    """Each weight to the nearest value; `amax` by module sets the scale of a layer."""

    def encode(part: Part, dtype: str, read: Read) -> tuple[Any, Any, Any]:
        import torch
        from nibble_kernels.weight_quant import quantize

        largest = torch.tensor(amax[part.module])
        weight = quantize(weight_of(part, dtype, read), largest, four_over_six=four_over_six)
        return (
            weight.packed.numpy().data,
            weight.scales.view(torch.uint8).numpy().data,
            weight.global_scale.numpy().tobytes(),
        )

    return encode


def weight_of(part: Part, dtype: str, read: Read) -> Any:
    """A part of a stored tensor as a torch tensor [N, K]."""
    import torch

    torch_dtype = getattr(torch, TORCH_DTYPES[dtype])
    size = torch_dtype.itemsize
    data = read(part.first * size, part.rows * part.columns * size)
    return torch.frombuffer(data, dtype=torch_dtype).view(part.rows, part.columns)


def select(
    tensors: Mapping[str, TensorInfo], hidden_size: int | None, exclude: Iterable[str]
) -> dict[str, tuple[Part, ...]]:
    """The linear layers to quantize, by tensor name; `exclude` are patterns of module names.

    Raises USAGE for a pattern that matches nothing or a part of a fused layer, CONFIG for a layer
    whose K is not a multiple of 16 and for stacked experts of an unknown orientation.
    """
    patterns = tuple(exclude)
    found: dict[str, tuple[Part, ...]] = {}
    left_out: list[str] = []
    for info in tensors.values():
        if STACKED_EXPERTS.search(info.name) and _matches(info.name, patterns):  # of any form
            left_out.append(info.name)
            continue
        all_parts = _parts(info, tensors, hidden_size)
        parts = [part for part in all_parts if not _matches(part.module, patterns)]
        left_out += [part.module for part in all_parts if part not in parts]
        if not parts:
            continue
        if info.dtype not in TORCH_DTYPES:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{info.name} is {info.dtype}",
                expected="BF16, F16 or F32 weights",
                action="choose another source",
            )
        if parts[0].columns % GROUP_SIZE:
            what = f"{info.name} has {parts[0].columns} input features"
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected="a multiple of 16",
                action=f"exclude it: --exclude '{parts[0].module}'",
            )
        found[info.name] = tuple(parts)
    # A tied head has no tensor; a pattern that excludes heads covers it too.
    _check_patterns(
        patterns, [*left_out, "lm_head", *(name.rpartition(".")[0] for name in tensors)]
    )
    _check_fused([part.module for parts in found.values() for part in parts], left_out)
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Iterable[str], modules: Iterable[str]) -> None:
    """Raise USAGE for a pattern without a match: nibble would quantize what it was to exclude."""
    known = list(modules)
    for pattern in patterns:
        if not any(fnmatchcase(module, pattern) for module in known):
            expected = "a pattern of whole names, such as '*.down_proj'"
            raise NibbleError(
                ExitCode.USAGE, what=f"--exclude {pattern!r} matches no module", expected=expected
            )


def _check_fused(quantized: Iterable[str], left_out: Iterable[str]) -> None:
    """Raise USAGE for a fused layer of vLLM of which --exclude names only a part."""
    plain = {layer: module for module in left_out if (layer := fused_layer(module))}
    for module in quantized:
        if (layer := fused_layer(module)) in plain:
            raise NibbleError(
                ExitCode.USAGE,
                what=f"--exclude matches {plain[layer]} but not {module}",
                expected=f"all or nothing of {layer}, which vLLM builds as one layer",
                action="exclude the others too, each with another --exclude",
            )


def _parts(
    info: TensorInfo, tensors: Mapping[str, TensorInfo], hidden_size: int | None
) -> list[Part]:
    if kind_of(info.name) not in QUANTIZED_KINDS:
        return []
    if info.name.endswith(".weight") and len(info.shape) == 2:
        return [Part(info.name.removesuffix(".weight"), *info.shape)]
    if len(info.shape) == 3 and STACKED_EXPERTS.search(info.name):
        return _stacked(info, info.name.rpartition(".")[2], tensors, hidden_size)
    return []


def _stacked(
    info: TensorInfo, leaf: str, tensors: Mapping[str, TensorInfo], hidden_size: int | None
) -> list[Part]:
    """Experts of one tensor, [E, 2I, H] or [E, H, I], one by one, as ModelOpt writes and vLLM reads
    them.
    """
    experts, rows, columns = info.shape
    known = columns == hidden_size if leaf == "gate_up_proj" else rows == hidden_size
    if not known or rows == columns or f"{info.name}_bias" in tensors:
        what = f"{info.name} of shape {list(info.shape)} has experts in an unknown form"
        expected = "gate_up_proj [E, 2I, H] and down_proj [E, H, I] without biases"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected=expected,
            action="exclude them: --exclude '*.experts.*'",
        )
    prefix = info.name.removesuffix(f".{leaf}")
    leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    size = rows // len(leaves)
    return [
        Part(f"{prefix}.{expert}.{name}", size, columns, (expert * rows + place * size) * columns)
        for expert in range(experts)
        for place, name in enumerate(leaves)
    ]


def weight_amax(
    values: Values,
    where: str,
    tensors: Mapping[str, TensorInfo],
    parts: Mapping[str, tuple[Part, ...]],
) -> Amax:
    """The largest magnitude of each layer's weight. Raises MODEL, naming `where`, for values that
    are not finite.
    """

    def largest(name: str) -> Amax:
        info, read = tensors[name], values(tensors[name])
        return {
            part.module: finite(where, part, largest_of(part, info.dtype, read))
            for part in parts[name]
        }

    found: Amax = {}
    for each in ahead(parts, largest, lambda name: tensors[name].nbytes):
        found |= each
    return found


def largest_of(part: Part, dtype: str, read: Read) -> float:
    """The largest magnitude of a part of a stored tensor."""
    from nibble_kernels.weight_quant import largest_magnitude

    return float(largest_magnitude(weight_of(part, dtype, read)))


def finite(where: str, part: Part, largest: float) -> float:
    """`largest`. Raises MODEL, naming `where`, for a layer with values that are not finite."""
    if not math.isfinite(largest):
        what = f"{part.module}.weight in {where} holds values that are not finite"
        raise NibbleError(ExitCode.MODEL, what=what, action="download the model again")
    return largest


def share_scales(amax: Amax) -> Amax:
    """Each layer's largest magnitude, raised to that of the layers it is fused with.

    They then get the same scale, as in ModelOpt and llm-compressor.
    """
    shared: defaultdict[str, float] = defaultdict(float)
    for module, largest in amax.items():
        shared[group(module)] = max(shared[group(module)], largest)
    return {module: shared[group(module)] for module in amax}


def group(module: str) -> str:
    """A name that is the same for layers that vLLM fuses."""
    prefix, _, leaf = module.rpartition(".")
    first = next((parts[0] for parts in FUSED if leaf in parts), leaf)
    return f"{prefix}.{first}"


def input_scales(modules: Iterable[str], amax: Mapping[str, float]) -> dict[str, float]:
    """The activation scale of each layer from its inputs in calibration.

    Experts that no text reached get the largest of their layer. Raises CONFIG for a layer that
    calibration does not know.
    """
    by_kind: defaultdict[str, float] = defaultdict(float)
    for name, largest in amax.items():
        by_kind[_kind(name)] = max(by_kind[_kind(name)], largest)
    known = {without_model(name): largest for name, largest in amax.items()}
    kinds = {without_model(name): largest for name, largest in by_kind.items()}
    found = {}
    for module in modules:
        name = without_model(module)
        largest = known.get(name) or kinds.get(_kind(name))
        if not largest:
            what = f"no calibration text reached {module}"
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                action="give other texts, exclude it with --exclude, or use --activations bf16",
            )
        found[module] = largest / (E2M1_MAX * E4M3_MAX)
    return found


def _kind(module: str) -> str:
    """The common name of a layer's experts."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", module)


def without_model(name: str) -> str:
    """The name without `model.`, which files and transformers use differently."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))
