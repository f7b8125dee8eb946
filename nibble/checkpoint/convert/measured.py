"""What a conversion measures with the whole model: activation scales, cache scales, sensitivity."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nibble.checkpoint.convert import gptq
from nibble.checkpoint.convert.calibrate import Loaded, largest, load, token_rows
from nibble.checkpoint.convert.files import tensor
from nibble.checkpoint.convert.original import Original
from nibble.checkpoint.convert.quantize import (
    E4M3_MAX,
    CacheScales,
    Part,
    Quantization,
    input_scales,
    rounding,
)
from nibble.checkpoint.convert.sensitivity import divergences, most_sensitive
from nibble.checkpoint.convert.wishes import Wishes
from nibble.checkpoint.headers import TensorInfo
from nibble.errors import ExitCode, NibbleError

EVERY = 4  # of GPTQ's rows are read: 4,096 tokens
LEAST = 2.0**-20  # a magnitude: servers take only scales above 0
CACHE_PARTS = (("k_proj", "k_scale"), ("v_proj", "v_scale"))

Parts = Mapping[str, tuple[Part, ...]]


@dataclass(frozen=True)
class Measured:
    """`parts` without the layers that --keep-sensitive leaves in BF16, which are `kept`."""

    parts: Parts
    input_scales: Mapping[str, float]
    cache_scales: CacheScales
    kept: tuple[str, ...] = ()


def measured(model: Original, dest: Path, parts: Parts, wishes: Wishes) -> Measured:
    """Load the model in transformers, where the wishes need it."""
    if wishes.activations != "fp4" and not wishes.fp8_cache and not wishes.keep_percent:
        return Measured(parts, {}, {})
    if wishes.keep_percent:
        gptq.check_modules(parts, "--keep-sensitive")
    if wishes.fp8_cache:
        cache_layers(model.found.tensors)  # refuses before the model is loaded
    with model.bf16_folder(dest) as folder:
        loaded = load(folder)
        kept = _sensitive(loaded, folder, model, parts, wishes) if wishes.keep_percent else []
        rest = _without(parts, kept)
        if not rest:
            raise NibbleError(
                ExitCode.USAGE,
                what=f"--keep-sensitive {wishes.keep_percent:g} leaves every layer in BF16",
                expected="a smaller percentage",
            )
        if wishes.activations != "fp4" and not wishes.fp8_cache:
            return Measured(rest, {}, {}, tuple(kept))
        rows = (
            token_rows(loaded.tokenizer, wishes.texts)
            if wishes.texts
            else gptq.calibration_rows(folder, gptq.default_texts())[::EVERY]
        )
        most = largest(loaded, rows)
    modules = [part.module for group in rest.values() for part in group]
    return Measured(
        rest,
        input_scales(modules, most.inputs) if wishes.activations == "fp4" else {},
        cache_scales(model.found.tensors, most.caches) if wishes.fp8_cache else {},
        tuple(kept),
    )


def _sensitive(
    loaded: Loaded, folder: Path, model: Original, parts: Parts, wishes: Wishes
) -> list[str]:
    """The modules to keep within the percentage of the checkpoint's size."""
    from nibble_kernels.weight_quant import dequantize, quantize

    tensors = model.found.tensors
    rows = gptq.calibration_rows(folder, wishes.texts or gptq.default_texts())[::EVERY]
    all_parts = [part for group in parts.values() for part in group]
    found = divergences(
        loaded,
        [part.module for part in all_parts],
        rows,
        lambda weight: dequantize(quantize(weight, four_over_six=wishes.four_over_six)),
    )
    conversion = Quantization(parts, rounding({}, False), {}, {})
    size = sum(one.nbytes for info in tensors.values() for one in conversion.outputs(info))
    element_bytes = max(tensors[name].nbytes // _elements(tensors[name]) for name in parts)
    return most_sensitive(found, all_parts, element_bytes, size * wishes.keep_percent / 100)


def _elements(info: TensorInfo) -> int:
    return tensor(info.name, "U8", info.shape).nbytes


def _without(parts: Parts, kept: Sequence[str]) -> Parts:
    left_out = set(kept)
    found = {
        name: tuple(part for part in group if part.module not in left_out)
        for name, group in parts.items()
    }
    return {name: group for name, group in found.items() if group}


def cache_layers(tensors: Mapping[str, TensorInfo]) -> dict[int, dict[str, str]]:
    """The names of the scales beside each layer's key and value weights, by the layer's number.
    Raises CONFIG for a model without such weights in every layer that has one of them.
    """
    found: dict[int, dict[str, str]] = {}
    pattern = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.([kv]_proj)\.weight")
    leaves = dict(CACHE_PARTS)
    for name in tensors:
        if match := pattern.fullmatch(name):
            module = name.removesuffix(".weight")
            found.setdefault(int(match[1]), {})[name] = f"{module}.{leaves[match[2]]}"
    if not found or any(len(names) != len(CACHE_PARTS) for names in found.values()):
        raise NibbleError(
            ExitCode.CONFIG,
            what="--kv-cache fp8 does not find k_proj and v_proj in each attention layer",
            expected="layers.N.self_attn.k_proj and v_proj, as Llama, Qwen, Mistral and Gemma have",
            action="convert without it; --kv-cache-dtype fp8 serves any model, without scales",
        )
    return found


def cache_scales(
    tensors: Mapping[str, TensorInfo], caches: Sequence[tuple[float, float]]
) -> dict[str, tuple[str, float]]:
    """(name, value) of a scale by the weight's tensor: the smallest power of two with which E4M3
    holds the largest key, or value.

    E4M3 has the same relative error at every magnitude, except for the smallest numbers. So a power
    of two errs at most as much as no scale, and another factor would move every rounding.
    """
    layers = cache_layers(tensors)
    if sorted(layers) != list(range(len(caches))):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"the model has {len(layers)} attention layers with keys and values,"
            f" and transformers' cache {len(caches)}",
            expected="a cache for each layer",
            action="convert without --kv-cache",
        )
    found: dict[str, tuple[str, float]] = {}
    for number, names in layers.items():
        for weight, scale in names.items():
            most = caches[number][scale.endswith(".v_scale")]
            found[weight] = (scale, 2.0 ** math.ceil(math.log2(max(most, LEAST) / E4M3_MAX)))
    return found
