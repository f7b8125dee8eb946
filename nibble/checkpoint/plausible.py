"""Finds implausible scales and norms: a scale's reciprocal, zeros, a scale far from its neighbours.

An NVFP4 weight's largest value is 6 · its largest block scale · its global scale. BF16 models have
weights of 0.01 to some hundreds; a reciprocal in the place of a global scale makes it 10^5 to 10^9
with any block scales. The bounds lie between.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.layer_tensors import families
from nibble.checkpoint.nvfp4 import Nvfp4Weight, Problem, gather
from nibble.checkpoint.plain_values import SMALL_BYTES
from nibble.checkpoint.scale_values import TensorFiles, floats, largest_scale, numbers
from nibble.checkpoint.weights import kind_of

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0
LARGEST_WEIGHT = 2.0**14  # a reciprocal makes less of a weight whose largest value is above 440
FAR = 200.0  # from the median of a weight's namesakes in other layers
FAR_CACHE = 100.0  # a cache's scale
MIN_NEIGHBOURS = 3
_START_BYTES = 4096  # nearly all tensors have a value other than 0 there
# The names that vLLM takes for scales of the KV cache (vllm 0.32
# model_loader/weight_utils.py:1622).
_CACHE_SCALE = re.compile(r"\.(?:[kvq]|kv)_scale$|\.(?:q|[kv]_cache)\.scale$")
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
_NORM = re.compile(r"norm[^.]*\.weight$")
# Norms that multiply by 1 + weight, where 0 is the value they begin with (vllm 0.32 layernorm.py
# GemmaRMSNorm).
ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "nemotron")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class Plausibility:
    """`problems` are certain; `doubts` are sentences, with figures, about what is unlikely."""

    problems: tuple[Problem, ...]
    doubts: tuple[str, ...]


def check_plausible(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    weights: Sequence[Nvfp4Weight],
    model_type: str,
    num_layers: int | None = None,
) -> Plausibility:
    """Read the scales of the KV cache, global scales, and norms; block scales if a global scale is
    large.
    """
    with TensorFiles(folder) as files:
        cache = {
            name: _values(files, tensor)
            for name, tensor in tensors.items()
            if _CACHE_SCALE.search(name)
        }
        multipliers = {weight.module: _multipliers(files, weight) for weight in weights}
        norms = _zero_norms(files, tensors, num_layers)
        scales = [weight for weight in weights if weight.scale and _is_zero(files, weight.scale)]
        problems = [
            *_cache_problems(cache, tensors, num_layers),
            *_too_large(files, weights, multipliers),
            *_norm_problems(norms, model_type, num_layers),
            *_scale_problems(scales, weights),
        ]
    largest = {
        module: LARGEST_CODE * LARGEST_SCALE * max(found)
        for module, found in multipliers.items()
        if found
    }
    doubts = (
        *_far({name: max(values) for name, values in cache.items() if values}, FAR_CACHE, ""),
        *_far(largest, FAR, "weights of up to "),
        *_norm_doubts(norms, tensors, model_type),
        *_scale_doubts(scales),
    )
    return Plausibility(gather(problems), doubts)


def _values(files: TensorFiles, tensor: TensorInfo) -> tuple[float, ...]:
    return (
        numbers(files.read(tensor, 0, tensor.nbytes), tensor.dtype)
        if tensor.nbytes <= SMALL_BYTES
        else ()
    )


def _cache_problems(
    cache: Mapping[str, tuple[float, ...]],
    tensors: Mapping[str, TensorInfo],
    num_layers: int | None,
) -> Iterator[Problem]:
    for name, values in cache.items():
        if bad := [value for value in values if not 0 < value < math.inf]:
            what, expected = f"is {bad[0]}", "a finite number above 0"
            yield Problem.of(
                "cache scale", tensors[name], what, expected, kind_of(name, num_layers) == "draft"
            )


def _multipliers(files: TensorFiles, weight: Nvfp4Weight) -> tuple[float, ...]:
    """The global scales of a weight, one for each expert; empty where another check refuses the
    weight.
    """
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
            what = (
                f"is {value:.4g}, which makes weights of up to {largest:.3g} with its block scales"
            )
            expected = (
                f"weights of at most {LARGEST_WEIGHT:g}; the scale may be stored as its reciprocal"
            )
            yield Problem.of("global scale", weight.global_scale, what, expected, weight.is_draft)


def _zero_norms(
    files: TensorFiles, tensors: Mapping[str, TensorInfo], num_layers: int | None
) -> Sequence[TensorInfo]:
    """Norms of the language model and its drafts that hold only zeros."""
    return [
        tensor
        for name, tensor in tensors.items()
        if 0 < tensor.nbytes <= SMALL_BYTES
        and _NORM.search(name)
        and kind_of(name, num_layers) != "vision"
        and _is_zero(files, tensor)
    ]


def _norm_problems(
    norms: Iterable[TensorInfo], model_type: str, num_layers: int | None
) -> Iterator[Problem]:
    """Zero norms of families whose norms multiply by their weight."""
    if model_type in families() and model_type not in ONE_PLUS:
        for norm in norms:
            is_draft = kind_of(norm.name, num_layers) == "draft"
            yield Problem.of(
                "zero norm", norm, "holds only zeros", "factors other than 0", is_draft
            )


def _norm_doubts(
    norms: Sequence[TensorInfo], tensors: Mapping[str, TensorInfo], model_type: str
) -> Iterator[str]:
    """Zero norms of other families, whose norms may multiply by 1 + weight: all zero is unlikely
    after training.
    """
    count = sum(_NORM.search(name) is not None and kind_of(name) != "vision" for name in tensors)
    if model_type not in families() and len(norms) == count > 1:
        yield f"{norms[0].name} and the {count - 1} other norms hold only zeros"


def _scale_problems(
    zeros: Sequence[Nvfp4Weight], weights: Sequence[Nvfp4Weight]
) -> Iterator[Problem]:
    if (
        zeros
        and len(zeros) == sum(weight.scale is not None for weight in weights)
        and zeros[0].scale
    ):
        what, expected = "holds only zeros, as all block scales do", "scales above 0"
        yield Problem.of(
            "zero scales", zeros[0].scale, what, expected, all(w.is_draft for w in weights)
        )


def _scale_doubts(zeros: Iterable[Nvfp4Weight]) -> Iterator[str]:
    """Doubts about scales; an expert that no token reached in training may be zero."""
    found = [
        weight.scale.name for weight in zeros if weight.scale and _EXPERTS not in weight.module
    ]
    if found:
        yield f"{found[0]} holds only zeros{_more(found)}, so that the weight is 0"


def _is_zero(files: TensorFiles, tensor: TensorInfo) -> bool:
    start = files.read(tensor, 0, min(tensor.nbytes, _START_BYTES))
    return not any(start) and all(data.count(0) == len(data) for data in files.chunks(tensor))


def _more(found: Sequence[Any]) -> str:
    return f" ({len(found) - 1} more like it)" if found[1:] else ""


def _far(values: Mapping[str, float], ratio: float, what: str) -> Iterator[str]:
    """Sentences about values far from the median of the same tensor in other layers.

    Experts far below the median are usual: no token reached them in training.
    """
    groups: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in values.items():
        groups[_NUMBER.sub(".*", name)][name] = value
    found = []
    for named in groups.values():
        middle = median(named.values())
        if len(named) > MIN_NEIGHBOURS and 0 < middle < math.inf:
            found += [
                (name, value, middle)
                for name, value in named.items()
                if value > middle * ratio or (value < middle / ratio and _EXPERTS not in name)
            ]
    if found:
        name, value, middle = found[0]
        median_of = "the median of its namesakes in other layers"
        yield f"{name} has {what}{value:.3g}, and {median_of} is {middle:.3g}{_more(found)}"
