"""Which linear layers are quantized: a checkpoint's tensors against its config's exclusions.

vLLM 0.32 builds a layer quantized unless the config excludes it by name, and exporters write that
list from patterns: ModelOpt's `mtp.layers.0*` leaves `mtp.fc` out, whose weight is BF16 (ModelOpt
unified_export_hf.py _add_mtp_exclusions; vllm#38832), GLM's MTP layer is left out whole
(Model-Optimizer#750). Where list and tensors disagree the list is written anew here, and
`--hf-overrides` puts it in the place of the checkpoint's. MIXED_PRECISION names what is quantized
instead (mixed_layers.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.mixed_layers import algorithm_of, corrected_map
from nibble.checkpoint.vllm_config import algorithm, declared_config, one_expert_a_layer
from nibble.checkpoint.weights import kind_of

MIXED = "MIXED_PRECISION"
PLAIN = ("BF16", "F16", "F32")
MAX_OVERRIDE_BYTES = 120_000  # Linux takes 128 KiB in one word of a command
_EXPERTS = re.compile(
    r"^(.+\.experts)\.(?:\d+\.\w+\.weight(?:_packed)?|(?:gate_up_proj|down_proj)(?:_packed)?)$"
)
_LINEAR = re.compile(r"^(.+)\.weight(?:_packed)?$")
_ROUTER = re.compile(r"\.(?:gate|router|wg|shared_expert_gate)$")
# Models that pass their quantization config to routers (vllm 0.32 qwen3_moe.py:170,
# lfm2_moe.py:128, k2_horizon.py:493).
QUANTIZED_ROUTERS = ("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe", "lfm2_moe", "k2_horizon")
VISION = (
    "vision_tower",
    "vision_model",
    "vit_large_projector",
)  # never quantized, vllm 0.32 modelopt.py:248
_LANGUAGE_MODEL = ("model.language_model.", "language_model.model.")  # in files, and in vLLM


@dataclass(frozen=True)
class Modules:
    """Linear modules by their tensors, the routed experts of a layer as one module `….experts`.

    `config` is the quantization config as vLLM 0.32 finds it. `draft` names those of both that only
    a draft (MTP) uses. `algorithms` is how each quantized module is stored, for MIXED_PRECISION.
    """

    config: Mapping[str, Any] = field(repr=False)
    quantized: frozenset[str] = field(repr=False)
    plain: frozenset[str] = field(repr=False)
    draft: frozenset[str] = field(repr=False)
    algorithms: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Correction:
    """A quantization config with a corrected list of layers, and the modules that the old list had
    wrong.
    """

    config: Mapping[str, Any] = field(repr=False)
    wrong: tuple[str, ...]


def read_modules(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None,
    tensors: Mapping[str, TensorInfo] | None,
    num_layers: int | None,
    declared: Mapping[str, Any] | None = None,
) -> Modules | None:
    """The modules of a checkpoint whose config lists layers; None for other formats or without
    headers.

    `declared` is the quantization config for vLLM, where it is not the checkpoint's.
    """
    declared = declared or declared_config(config, hf_quant_config)
    if tensors is None or declared is None or not (algorithm(declared) or _is_compressed(declared)):
        return None
    is_mixed = algorithm(declared) == MIXED
    algorithms: dict[str, str] = {}
    quantized: set[str] = set()
    plain: set[str] = set()
    draft: set[str] = set()
    routers = config.get("model_type") in QUANTIZED_ROUTERS
    for tensor in tensors.values():
        name = _module(tensor)
        if name is None or (_ROUTER.search(name) and not routers):
            continue
        if kind_of(f"{name}.weight", num_layers) == "draft":
            name = _name_of_draft_in_vllm(name, config)
            draft.add(name)
        (plain if tensor.dtype in PLAIN else quantized).add(name)
        if is_mixed and tensor.dtype not in PLAIN:
            algorithms[name] = algorithm_of(tensor, tensors)
    if not any(name.endswith("lm_head") for name in quantized | plain):
        # Tied: vLLM builds it like any other layer and gives it the embedding's weight alone
        plain.add("lm_head")
    both = quantized & plain  # experts of one layer in two forms: vLLM builds all of them alike
    return Modules(
        declared,
        frozenset(quantized - both),
        frozenset(plain - both),
        frozenset(draft - both),
        {name: found for name, found in algorithms.items() if name not in both},
    )


def correct(modules: Modules, with_draft: bool, forced: Iterable[str] = ()) -> Correction | None:
    """The config with a list that matches the tensors; None if it matches already or cannot be
    corrected.

    `with_draft`: whether vLLM will build the draft's modules. `forced`: modules that vLLM builds
    unquantized in any case.
    """
    unused = frozenset() if with_draft else modules.draft
    if algorithm(modules.config) == MIXED:
        return _correct_map(modules, unused)
    quantized = modules.quantized - unused
    plain = [
        name
        for name in modules.plain - unused
        if name not in forced and _is_meant(name, modules.config)
    ]
    compressed = _is_compressed(modules.config)
    matches = _compressed_matches if compressed else _modelopt_matches
    entries = excluded(modules.config)
    missing = [name for name in plain if not _excluded(name, entries, matches)]
    hidden = [name for name in quantized if any(matches(name, entry) for entry in entries)]
    if not quantized or not (missing or hidden):
        return None
    kept = [entry for entry in entries if not any(matches(name, entry) for name in hidden)]
    uncovered = [name for name in plain if not _excluded(name, kept, matches)]
    added = (
        map(_compressed_entry, uncovered) if compressed else _cover(uncovered, modules.quantized)
    )
    corrected = _with_excluded(modules.config, [*kept, *sorted(set(added))])
    if len(json.dumps(corrected)) > MAX_OVERRIDE_BYTES:
        return None
    return Correction(corrected, tuple(sorted(missing + hidden)))


def _correct_map(modules: Modules, unused: frozenset[str]) -> Correction | None:
    """MIXED_PRECISION: the map of quantized layers follows the tensors."""
    inner = modules.config.get("quantization")
    place = inner if isinstance(inner, Mapping) else modules.config
    layers = place.get("quantized_layers")
    quantized = {name: found for name, found in modules.algorithms.items() if name not in unused}
    found = corrected_map(
        layers if isinstance(layers, Mapping) else {}, quantized, modules.plain - unused
    )
    if found is None or not found[1]:
        return None
    changed = {**place, "quantized_layers": one_expert_a_layer(found[0])}
    changed.pop("config_groups", None)  # they repeat the map, and vLLM does not read them here
    config = {**modules.config, "quantization": changed} if place is inner else changed
    return (
        Correction(config, tuple(found[1]))
        if len(json.dumps(config)) <= MAX_OVERRIDE_BYTES
        else None
    )


def is_empty_map(declared: Mapping[str, Any]) -> bool:
    """MIXED_PRECISION without a map of layers, which vLLM 0.32 refuses (modelopt.py:1655)."""
    inner = declared.get("quantization")
    place = inner if isinstance(inner, Mapping) else declared
    return algorithm(declared) == MIXED and not place.get("quantized_layers")


def excluded(declared: Mapping[str, Any]) -> list[str]:
    """The list that vLLM 0.32 reads (modelopt.py:313-341, compressed_tensors.py:241), with nibble's
    patch for N15.
    """
    inner = declared.get("quantization")
    if isinstance(inner, Mapping):
        found = inner.get("exclude_modules")
    else:
        found = declared.get("ignore", declared.get("exclude_modules"))
    return [str(entry) for entry in found] if isinstance(found, list) else []


def _with_excluded(declared: Mapping[str, Any], entries: list[str]) -> dict[str, Any]:
    inner = declared.get("quantization")
    if isinstance(inner, Mapping):
        return {**declared, "quantization": {**inner, "exclude_modules": entries}}
    return {**declared, "ignore": entries}


def _is_compressed(declared: Mapping[str, Any]) -> bool:
    return str(declared.get("quant_method", "")).replace("_", "-") == "compressed-tensors"


def _module(tensor: TensorInfo) -> str | None:
    """The linear module (or the experts) of a weight; None for any other tensor, such as an
    embedding.
    """
    if not tensor.name.endswith(
        (".weight", "_packed", "_proj")
    ):  # most of 190,000 tensors are scales
        return None
    if match := _EXPERTS.match(tensor.name):
        return match[1]
    match = _LINEAR.match(tensor.name)
    if match is None or len(tensor.shape) != 2 or kind_of(tensor.name) == "embedding":
        return None
    return None if "embed" in match[1].rpartition(".")[2] else match[1]


def _name_of_draft_in_vllm(name: str, config: Mapping[str, Any]) -> str:
    """vLLM's name for a module of LongCat's draft; it looks exclusions up by that name
    (longcat_flash_mtp.py:45, 185).
    """
    if not str(config.get("model_type")).startswith("longcat_flash"):
        return name
    layer = f"model.layers.{2 * int(config.get('num_layers') or 0)}."
    return name.replace("model.mtp.layers.0.eh_proj", "eh_proj").replace(
        "model.mtp.layers.0.transformer_layer.", layer
    ).replace("model.mtp.layers.0.", layer)  # fmt: skip


# --- what an entry matches ------------------------------------------------------------------------

Matches = Callable[[str, str], bool]


def _modelopt_matches(name: str, entry: str) -> bool:
    """vllm 0.32 modelopt.py:190 with quant_utils.py:617. An entry matches parts of a name between
    dots; vLLM's substring search matches more, which is its defect (patches/vllm).
    """
    if f".{entry}." in f".{name}." or fnmatchcase(name, entry):
        return True
    return name.endswith(".experts") and entry.startswith(f"{name}.")


def _compressed_matches(name: str, entry: str) -> bool:
    """vllm 0.32 compressed_tensors/utils.py:57; of experts vLLM looks up number 0
    (compressed_tensors_moe.py:36).
    """
    asked = f"{name}.0.gate_proj" if name.endswith(".experts") else name
    return re.match(entry[3:], asked) is not None if entry.startswith("re:") else entry == asked


def _excluded(name: str, entries: Iterable[str], matches: Matches) -> bool:
    """Whether an entry matches the name in the file or vLLM's: lists contain both."""
    names = {name, name.removeprefix("model.")}
    names |= {name.replace(_LANGUAGE_MODEL[0], new, 1) for new in (_LANGUAGE_MODEL[1], "model.")}
    return any(matches(one, entry) for entry in entries for one in names)


def _is_meant(name: str, declared: Mapping[str, Any]) -> bool:
    """Whether a module is quantized unless excluded. In compressed-tensors a group targets it; the
    class "Linear" means every linear layer but the output head (compressed_tensors/utils.py:90).
    """
    if not _is_compressed(declared):
        return not any(part in name for part in VISION)
    groups = declared.get("config_groups")
    targets = [
        str(target)
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
        for target in group.get("targets") or ()
    ]
    by_class = "Linear" in targets and kind_of(f"{name}.weight") != "lm_head"
    return by_class or _excluded(name, targets, _compressed_matches)


# --- new entries ----------------------------------------------------------------------------------


def _cover(names: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """The names, as `prefix.*` for the largest parts of the model without quantized layers
    (ModelOpt takes patterns, which also match vLLM's fused layers).
    """
    occupied = {prefix for name in quantized for prefix in _prefixes(name)}
    free = {
        name: [prefix for prefix in _prefixes(name)[:-1] if prefix not in occupied]
        for name in names
    }
    return [f"{prefixes[0]}.*" if prefixes else name for name, prefixes in free.items()]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _compressed_entry(name: str) -> str:
    """An entry for compressed-tensors: vLLM renames names, but not expressions
    (compressed_tensors.py:112).
    """
    if not name.endswith(".experts"):
        return name
    names = dict.fromkeys((name, name.replace(_LANGUAGE_MODEL[0], _LANGUAGE_MODEL[1], 1)))
    return f"re:(?:{'|'.join(map(re.escape, names))})\\."
