"""Scales and norms that are numbers and cannot be meant: a scale's reciprocal, zeros, a scale far from its neighbours.

An NVFP4 weight's largest value is 6 · its largest block scale · its global scale. Models in BF16 have weights of 0.01 to some
hundreds; a reciprocal in the place of a global scale makes it 10^5 to 10^9, whatever the block scales. Bounds lie between.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.layer_tensors import families
from nibble.checkpoint.nvfp4 import Nvfp4Weight, Problem, gather
from nibble.checkpoint.plain_values import SMALL_BYTES
from nibble.checkpoint.scale_values import TensorFiles, floats, largest_scale, numbers
from nibble.errors import ExitCode

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0
LARGEST_WEIGHT = 2.0**14  # a reciprocal makes less of a weight whose largest value is above 440
FAR = 200.0  # from the median of a weight's namesakes in other layers
FAR_CACHE = 100.0  # a cache's scale
MIN_NEIGHBOURS = 3
_CACHE_SCALE = re.compile(r"\.(?:k|v|q)_scale$")
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
_NORM = re.compile(r"norm[^.]*\.weight$")
# Norms that multiply by 1 + weight, where 0 is the value they begin with (vllm 0.32 layernorm.py GemmaRMSNorm).
ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5")


@dataclass(frozen=True)
class Plausibility:
    """`problems` no exporter means; `doubts` are sentences, with the figures, about what is unlikely."""

    problems: tuple[Problem, ...]
    doubts: tuple[str, ...]


def check_plausible(
    folder: Path, tensors: Mapping[str, TensorInfo], weights: Sequence[Nvfp4Weight], model_type: str
) -> Plausibility:
    """Read the scales of the KV cache, the global scales of `weights`, and norms; block scales where a global scale is large."""
    with TensorFiles(folder) as files:
        cache = {
            name: _values(files, tensor) for name, tensor in tensors.items() if _CACHE_SCALE.search(name)
        }
        multipliers = {weight.module: _multipliers(files, weight) for weight in weights}
        problems = [
            *_cache_problems(cache, tensors),
            *_too_large(files, weights, multipliers),
            *_zeros(files, tensors, weights, model_type),
        ]
    largest = {
        module: LARGEST_CODE * LARGEST_SCALE * max(found) for module, found in multipliers.items() if found
    }
    doubts = (
        *_far({name: max(values) for name, values in cache.items() if values}, FAR_CACHE, ""),
        *_far(largest, FAR, "weights of up to "),
    )
    return Plausibility(gather(problems), doubts)


def _values(files: TensorFiles, tensor: TensorInfo) -> tuple[float, ...]:
    return numbers(files.read(tensor, 0, tensor.nbytes), tensor.dtype) if tensor.nbytes <= SMALL_BYTES else ()


def _cache_problems(
    cache: Mapping[str, tuple[float, ...]], tensors: Mapping[str, TensorInfo]
) -> Iterator[Problem]:
    for name, values in cache.items():
        if bad := [value for value in values if not 0 < value < math.inf]:
            what, expected = f"is {bad[0]}", "a finite number above 0"
            yield Problem("cache scale", ExitCode.MODEL, name, tensors[name].file, what, expected)


def _multipliers(files: TensorFiles, weight: Nvfp4Weight) -> tuple[float, ...]:
    """The global scale of a weight, or of each of its experts; nothing for one that other checks refuse."""
    if weight.global_scale is None or weight.global_scale.dtype != "F32":
        return ()
    stored = floats(files.read(weight.global_scale, 0, weight.global_scale.nbytes))
    if not all(0 < value < math.inf for value in stored):
        return ()
    return tuple(1 / value for value in stored) if weight.layout == "compressed-tensors" else stored


def _too_large(
    files: TensorFiles, weights: Iterable[Nvfp4Weight], multipliers: Mapping[str, tuple[float, ...]]
) -> Iterator[Problem]:
    for weight in weights:
        largest = LARGEST_CODE * LARGEST_SCALE * max(multipliers[weight.module], default=0.0)
        if largest <= LARGEST_WEIGHT or weight.global_scale is None or weight.scale is None:
            continue
        if weight.scale.dtype == "F8_E4M3":
            largest *= largest_scale(files.chunks(weight.scale)) / LARGEST_SCALE
        if largest > LARGEST_WEIGHT:
            value = floats(files.read(weight.global_scale, 0, 4))[0]
            what = f"is {value:.4g}, which makes weights of up to {largest:.3g} with its block scales"
            expected = f"weights of at most {LARGEST_WEIGHT:g}; the scale may be stored as its reciprocal"
            yield Problem("global scale", ExitCode.MODEL, weight.global_scale.name, weight.global_scale.file, what, expected,
                          weight.is_draft)  # fmt: skip


def _zeros(
    files: TensorFiles, tensors: Mapping[str, TensorInfo], weights: Sequence[Nvfp4Weight], model_type: str
) -> Iterator[Problem]:
    """Norms of zeros, where a norm multiplies by its weight; block scales of zeros in every weight."""
    if model_type in families() and model_type not in ONE_PLUS:
        for name, tensor in tensors.items():
            small = 0 < tensor.nbytes <= SMALL_BYTES
            if small and _NORM.search(name) and _is_zero(files, tensor):
                yield Problem(
                    "zero norm", ExitCode.MODEL, name, tensor.file, "holds zeros alone", "a norm's factors"
                )
    scales = [weight.scale for weight in weights if weight.scale is not None]
    if scales and all(_is_zero(files, scale) for scale in scales):
        what, expected = "holds zeros alone, as all block scales do", "scales above 0"
        yield Problem("zero scales", ExitCode.MODEL, scales[0].name, scales[0].file, what, expected)


def _is_zero(files: TensorFiles, tensor: TensorInfo) -> bool:
    return all(data.count(0) == len(data) for data in files.chunks(tensor))


def _far(values: Mapping[str, float], ratio: float, what: str) -> Iterator[str]:
    """Sentences about values far from the median of their namesakes in other layers."""
    groups: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in values.items():
        groups[_NUMBER.sub(".*", name)][name] = value
    found = []
    for named in groups.values():
        middle = median(named.values())
        if len(named) > MIN_NEIGHBOURS and 0 < middle < math.inf:
            found += [(n, v, middle) for n, v in named.items() if not middle / ratio < v < middle * ratio]
    if found:
        name, value, middle = found[0]
        more = f" ({len(found) - 1} more like it)" if found[1:] else ""
        yield f"{name} has {what}{value:.3g}, and the median of its namesakes in other layers is {middle:.3g}{more}"
