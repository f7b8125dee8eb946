"""Writes config.json and hf_quant_config.json of a conversion."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from nibble.checkpoint.exclusions import excluded
from nibble.checkpoint.scheme import QUARTET2_PRODUCER, quantization_config
from nibble.errors import ExitCode, NibbleError

Layout = Literal["modelopt", "compressed-tensors", "quartet-packed"]
Activations = Literal["bf16", "fp4"]
# The version whose format this is: 0.45 is the first with W4A16_NVFP4.
MODELOPT = {"name": "modelopt", "version": "0.45.0"}
# Readers of packed CloverLM weights check it: scales of another producer are row-major.
QUARTET = {"name": QUARTET2_PRODUCER, "version": "1.0"}
FP8_KV = {"dynamic": False, "num_bits": 8, "type": "float"}
CONFIG_FILE, HF_QUANT_FILE = "config.json", "hf_quant_config.json"


def write_configs(
    dest: Path,
    config: Mapping[str, Any],
    layout: Layout,
    activations: Activations,
    ignore: list[str],
    kv_cache: str | None,
) -> None:
    """Write config.json, and hf_quant_config.json if the layout has one, for `layout` in `dest`.

    `config` is the source's, `ignore` lists the unquantized modules, `kv_cache` is vLLM's name of a
    declared cache type.
    """
    plain = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }
    for key in (
        "text_config",
        "llm_config",
    ):  # its quantization would contradict the new one
        if isinstance(plain.get(key), Mapping):
            plain[key] = {
                k: v
                for k, v in plain[key].items()
                if k not in ("quantization_config", "compression_config")
            }
    if layout == "compressed-tensors":
        plain["quantization_config"] = compressed_tensors(activations, ignore, kv_cache)
    elif layout == "modelopt":
        plain["quantization_config"] = _modelopt(activations, ignore, kv_cache)
        _write(dest / HF_QUANT_FILE, _hf_quant(MODELOPT, _algorithm(activations), ignore, kv_cache))
    else:
        _write(dest / HF_QUANT_FILE, _hf_quant(QUARTET, "NVFP4", ignore, None))
    _write(dest / CONFIG_FILE, plain)


def _algorithm(activations: Activations) -> str:
    return "NVFP4" if activations == "fp4" else "W4A16_NVFP4"


def _modelopt(activations: Activations, ignore: list[str], kv_cache: str | None) -> dict[str, Any]:
    """A quantization_config in the form of ModelOpt 0.45 and later."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
    if activations == "fp4":
        group = {"input_activations": numbers, **group}
    found: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "quant_algo": _algorithm(activations),
    }
    if kv_cache:
        found["kv_cache_scheme"] = FP8_KV if "fp8" in kv_cache else kv_cache.upper()
    return {**found, "producer": MODELOPT, "quant_method": "modelopt"}


def _hf_quant(
    producer: Mapping[str, str], algorithm: str, ignore: list[str], kv_cache: str | None
) -> dict[str, Any]:
    kv_algorithm = None if kv_cache is None else "FP8" if "fp8" in kv_cache else kv_cache.upper()
    inner = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": kv_algorithm,
        "group_size": 16,
        "exclude_modules": ignore,
    }
    return {"producer": dict(producer), "quantization": inner}


def compressed_tensors(
    activations: Activations, ignore: list[str], kv_cache: str | None
) -> dict[str, Any]:
    """A quantization_config in llm-compressor's form."""
    numbers = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "format": "nvfp4-pack-quantized",
        "weights": {**numbers, "dynamic": False},
        "input_activations": {**numbers, "dynamic": "local"} if activations == "fp4" else None,
    }
    found: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
    if kv_cache:
        found["kv_cache_scheme"] = {**FP8_KV, "strategy": "tensor", "symmetric": True}
    return found


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def ignore_list(
    layout: Layout,
    config: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None,
    quantized: Iterable[str],
    plain: Iterable[str],
) -> list[str]:
    """The unquantized modules in the terms of `layout`: the source's entries, and modules they
    omit.

    `quantized` and `plain` are the linear modules by their tensors, which decide: an entry that
    matches a quantized module is dropped.
    """
    hit = _any(quantized)
    declared = quantization_config(config) or hf_quant or {}
    regexes = layout == "compressed-tensors"
    kept = []
    for entry in excluded(declared):
        pattern = _as_regex(entry)
        if pattern is None or hit(pattern):
            continue
        if not regexes and entry.startswith("re:"):
            continue  # ModelOpt has no expressions: the code below names its modules
        kept.append(
            f"re:{pattern.pattern}"
            if regexes and "*" in entry and not entry.startswith("re:")
            else entry
        )
    covered = [p for p in map(_as_regex, kept) if p is not None]
    uncovered = [name for name in plain if not any(p.match(name) for p in covered)]
    return sorted({*kept, *_compact(uncovered, quantized, regexes)})


def _as_regex(entry: str) -> re.Pattern[str] | None:
    """A pattern for `match`; None for an entry that is not one."""
    try:
        if entry.startswith("re:"):
            return re.compile(entry[3:])
        return re.compile(
            "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", entry))
            + "$"
        )
    except re.error:
        return None


def _any(names: Iterable[str]) -> Callable[[re.Pattern[str]], bool]:
    known = list(names)
    return lambda pattern: any(pattern.match(name) for name in known)


def _compact(names: Iterable[str], quantized: Iterable[str], regexes: bool) -> Iterable[str]:
    """Names, with the experts of a layer as one entry if none of them is quantized."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"(\.experts)\..+$", r"\1.*", name)].append(name)
    partly = {re.sub(r"(\.experts)\..+$", r"\1.*", name) for name in quantized}
    for entry, members in groups.items():
        if not entry.endswith(".experts.*") or entry in partly:
            yield from members
        else:
            yield f"re:{re.escape(entry[:-1])}.*" if regexes else entry


def no_kv(kv_cache: str | None, layout: Layout) -> None:
    """Raise CONFIG if `layout` cannot declare the checkpoint's KV cache type."""
    if kv_cache and (
        layout == "quartet-packed" or (layout == "compressed-tensors" and "fp8" not in kv_cache)
    ):
        what = f"the source declares a KV cache in {kv_cache}, which {layout} cannot declare"
        raise NibbleError(ExitCode.CONFIG, what=what, action="choose --to modelopt")
