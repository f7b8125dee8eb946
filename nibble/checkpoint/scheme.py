"""How a checkpoint's weights are quantized, by its config and by its tensors.

What vLLM 0.32 accepts is in its model_executor/layers/quantization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nibble.checkpoint.compressed_tensors import group_kind, unread_weights
from nibble.checkpoint.headers import TensorInfo

Config = Mapping[str, Any]
Tensors = Mapping[str, TensorInfo]

PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
# ModelOpt algorithm -> (our name, vLLM's --quantization, bits, activations); vllm 0.32 modelopt.py
# LINEAR_ALGOS.
MODELOPT: Mapping[str, tuple[str, str, int, str]] = {
    "NVFP4": ("NVFP4", "modelopt_fp4", 4, "fp4"),
    "W4A16_NVFP4": ("W4A16_NVFP4", "modelopt_fp4", 4, "bf16"),
    "FP8": ("FP8", "modelopt", 8, "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8_PER_CHANNEL_PER_TOKEN", "modelopt", 8, "fp8"),
    "FP8_PB_WO": ("FP8_PB_WO", "modelopt", 8, "fp8"),
    "MXFP8": ("MXFP8", "modelopt_mxfp8", 8, "fp8"),
}
NOT_IN_VLLM = (
    "NVFP4_AWQ",
    "NVFP4_SVD",
    "W4A8_AWQ",
    "INT4_AWQ",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "INT8_SQ",
)
# quant_method in config.json of other tools -> (bits or None: read them, activations, supported by
# vLLM 0.32)
OTHER_METHODS: Mapping[str, tuple[int | None, str, bool]] = {
    "fp8": (8, "fp8", True),
    "fbgemm_fp8": (8, "fp8", True),
    "awq": (None, "bf16", True),
    "gptq": (None, "bf16", True),
    "auto-round": (None, "bf16", True),
    "mxfp4": (4, "bf16", True),
    "fp-quant": (4, "fp4", True),
    "quark": (None, "bf16", True),
    "torchao": (None, "bf16", True),
    "bitsandbytes": (None, "bf16", False),
    "aqlm": (2, "bf16", False),
    "hqq": (None, "bf16", False),
    "eetq": (8, "bf16", False),
}
COMPRESSED_TENSORS = "compressed-tensors"
QUARTET2_PRODUCER = "cloverlm_converter"  # writes tiled scales under ModelOpt's names
VLLM_NAMES = {"auto-round": "inc", "fp-quant": "fp_quant"}


@dataclass(frozen=True)
class Scheme:
    """The quantization of a checkpoint.

    `vllm_quantization` is the value vLLM's --quantization would resolve to (None: not quantized).
    `weight_bits` are those of the bulk of the linear layers; `activations` the type they are
    multiplied in; `kv_cache` the vLLM dtype the checkpoint declares. `notes` are contradictions and
    traps; `unsupported_reason` is empty when vLLM 0.32 can load it. `is_relabelled`: W4A4 by its
    config, weight-only by its tensors.
    """

    name: str
    vllm_quantization: str | None
    weight_bits: int
    activations: str
    kv_cache: str | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()
    is_nvfp4: bool = False
    unsupported_reason: str = ""
    is_relabelled: bool = False


def detect_scheme(
    config: Config, hf_quant_config: Config | None, tensors: Tensors | None
) -> Scheme:
    """The scheme of a checkpoint from config.json, hf_quant_config.json and, where known, its
    tensors.
    """
    declared = quantization_config(config)
    is_cloverlm = _text_value(config, "model_type") == "cloverlm"
    if QUARTET2_PRODUCER in (_producer(hf_quant_config), _producer(declared)):
        return _cloverlm(config, hf_quant_config, tensors)
    if is_cloverlm and not (declared and _is_row_major(declared)):
        return _cloverlm(config, hf_quant_config, tensors)
    scheme = _declared(config, declared, hf_quant_config, tensors)
    return _no_servers(scheme) if is_cloverlm else scheme


def _declared(
    config: Config, declared: Config | None, hf_quant_config: Config | None, tensors: Tensors | None
) -> Scheme:
    """The scheme by a config that says what the tensors are."""
    if declared is None and hf_quant_config is not None:
        return _from_hf_quant_config(hf_quant_config, tensors)
    if declared is None:
        return _unquantized(config, tensors)
    if _is_modelopt(declared):
        return _modelopt(declared, tensors)
    method = _method(declared)
    return (
        _compressed_tensors(declared) if method == COMPRESSED_TENSORS else _other(method, declared)
    )


def _method(declared: Config) -> str:
    return str(declared.get("quant_method", "")).lower().replace("_", "-")


def _is_modelopt(declared: Config) -> bool:
    method = _method(declared)
    return method.startswith("modelopt") or (not method and bool(_algorithm(declared)))


def _is_row_major(declared: Config) -> bool:
    """Whether NVFP4 scales lie row by row in the layout that a config names."""
    return _is_modelopt(declared) or _method(declared) == COMPRESSED_TENSORS


def _producer(declared: Config | None) -> str:
    producer = (declared or {}).get("producer")
    return str(producer.get("name", "")) if isinstance(producer, Mapping) else ""


def is_w4a4(scheme: Scheme) -> bool:
    """Whether every NVFP4 weight of the scheme has activations in NVFP4 too, by its config."""
    kinds = scheme.name.split("+")
    return (
        scheme.is_nvfp4
        and scheme.vllm_quantization != "quartet2"
        and "NVFP4" in kinds
        and "NVFP4A16" not in kinds
    )


def weight_only(scheme: Scheme) -> Scheme:
    """A W4A4 scheme whose checkpoint has no activation scale at all: served with activations in the
    model's type.

    ModelOpt before 0.45 gave weight-only exports the label NVFP4; vLLM 0.32 would take
    uninitialised memory for the scales.
    """
    names = {"NVFP4": "W4A16_NVFP4" if scheme.vllm_quantization == "modelopt_fp4" else "NVFP4A16"}
    name = "+".join(names.get(part, part) for part in scheme.name.split("+"))
    note = f"labelled {scheme.name} (W4A4) and without any activation scale: served weight-only"
    activations = "+".join(
        dict.fromkeys("bf16" if part == "fp4" else part for part in scheme.activations.split("+"))
    )
    return replace(
        scheme, name=name, activations=activations, notes=(*scheme.notes, note), is_relabelled=True
    )


def quantization_config(config: Config) -> Config | None:
    """`quantization_config` (or the old `compression_config`) of a config, also one nested with
    the text model.
    """
    for place in (config, config.get("text_config"), config.get("llm_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(place, Mapping) and isinstance(place.get(key), Mapping) and place[key]:
                return place[key]
    return None


def _text_value(config: Config, key: str) -> Any:
    nested = config.get("text_config")
    return config.get(key) or (nested.get(key) if isinstance(nested, Mapping) else None)


# --- not quantized --------------------------------------------------------------------------------


def _unquantized(config: Config, tensors: Tensors | None) -> Scheme:
    declared = str(
        _text_value(config, "dtype") or _text_value(config, "torch_dtype") or ""
    ).removeprefix("torch.")
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if tensors is None:
        name = names.get(declared, "bf16")
        return Scheme(
            name,
            None,
            32 if name == "fp32" else 16,
            name,
            detail="by config.json; weights not seen",
        )
    present = Counter[str]()
    for tensor in tensors.values():
        present[tensor.dtype] += tensor.nbytes
    main = present.most_common(1)[0][0] if present else "BF16"
    if packed := [t.name for t in tensors.values() if _is_packed_nvfp4(t, tensors)]:
        note = (
            f"tensors such as {packed[0]} are packed NVFP4 and no file says how they were quantized"
        )
        return Scheme("NVFP4", None, 4, "unknown", notes=(note,), is_nvfp4=True,
                      unsupported_reason="its config.json has no quantization_config")  # fmt: skip
    if main not in PLAIN:
        note = f"most weights are {main} and config.json has no quantization_config"
        return Scheme(main.lower(), None, 8, "bf16", notes=(note,), unsupported_reason=note)
    name = PLAIN[main]
    notes = ()
    if declared and names.get(declared, name) != name:
        notes = (f"weights are {name} and config.json says {declared}",)
    return Scheme(name, None, 32 if name == "fp32" else 16, name, notes=notes)


def _is_packed_nvfp4(tensor: TensorInfo, tensors: Tensors) -> bool:
    if tensor.dtype not in ("U8", "F4"):
        return False
    stem = tensor.name.removesuffix("_packed")
    scale = tensors.get(f"{stem}_scale") or tensors.get(f"{stem}_weight_scale")
    return scale is not None and scale.dtype == "F8_E4M3"


# --- ModelOpt -------------------------------------------------------------------------------------


def _from_hf_quant_config(hf: Config, tensors: Tensors | None) -> Scheme:
    """Only hf_quant_config.json, as ModelOpt <= 0.29 exports; what vLLM does not read of it,
    vllm_config.py rewrites.
    """
    scheme = _modelopt(hf, tensors)
    note = (
        "only hf_quant_config.json says how it is quantized; config.json has no quantization_config"
    )
    return replace(scheme, notes=(note, *scheme.notes))


def _algorithm(declared: Config) -> str:
    inner = declared.get("quantization")
    place = inner if isinstance(inner, Mapping) else declared
    return str(place.get("quant_algo") or "").upper()


def _modelopt(declared: Config, tensors: Tensors | None) -> Scheme:
    inner = declared.get("quantization")
    place: Config = inner if isinstance(inner, Mapping) else declared
    algorithm = _algorithm(declared)
    kv_cache = modelopt_kv_cache(declared)
    if algorithm == "MIXED_PRECISION":
        return _mixed(place, kv_cache)
    if algorithm not in MODELOPT:
        known = ", ".join((*MODELOPT, "MIXED_PRECISION"))
        bits = 4 if "4" in algorithm else 8
        reads = f"vLLM 0.32 reads these ModelOpt algorithms: {known}"
        reason = reads if algorithm else f"its quantization config names no quant_algo; {reads}"
        return Scheme(
            algorithm or "modelopt",
            None,
            bits,
            "unknown",
            kv_cache,
            is_nvfp4="NVFP4" in algorithm,
            unsupported_reason=reason,
        )
    name, vllm_name, bits, activations = MODELOPT[algorithm]
    scheme = Scheme(name, vllm_name, bits, activations, kv_cache, is_nvfp4="NVFP4" in name)
    if scheme.is_nvfp4 and not _is_16(place.get("group_size")):
        reason = f"its config says groups of {place['group_size']}, and NVFP4 has groups of 16"
        return replace(scheme, unsupported_reason=reason)
    if algorithm == "NVFP4":
        return _without_activations(scheme, declared)
    if algorithm == "W4A16_NVFP4" and tensors and any(n.endswith(".input_scale") for n in tensors):
        note = "it is labelled W4A16_NVFP4 and has input_scale tensors, which vLLM ignores"
        return replace(scheme, notes=(note,))
    return scheme


def _is_16(group_size: Any) -> bool:
    """As vLLM 0.32 reads it (modelopt.py:380): nothing is NVFP4's own size, and text is a
    number.
    """
    try:
        return group_size is None or int(group_size) == 16
    except (TypeError, ValueError, OverflowError):
        return False


def _without_activations(scheme: Scheme, declared: Config) -> Scheme:
    """NVFP4 whose config groups quantize no activations: vLLM 0.32 takes its W4A16 method."""
    groups = (declared.get("config_groups") or {}).values()
    if groups and not any(isinstance(g, Mapping) and g.get("input_activations") for g in groups):
        return replace(
            scheme,
            name="W4A16_NVFP4",
            activations="bf16",
            detail="no config group quantizes activations",
        )
    return scheme


def _mixed(place: Config, kv_cache: str | None) -> Scheme:
    layers = place.get("quantized_layers") or {}
    counts = Counter(str((entry or {}).get("quant_algo", "?")).upper() for entry in layers.values())
    detail = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    unknown = [name for name in counts if name not in MODELOPT]
    reason = f"it mixes in {unknown[0]}, which vLLM 0.32 does not know" if unknown else ""
    activations = (
        "+".join(sorted({MODELOPT[name][3] for name in counts if name in MODELOPT})) or "unknown"
    )
    bits = 4 if any("4" in name for name in counts) else 8
    notes = (
        ()
        if layers
        else ("MIXED_PRECISION without quantized_layers: they are taken from the tensors",)
    )
    return Scheme("MIXED_PRECISION", "modelopt_mixed", bits, activations, kv_cache, detail, notes,
                  any("NVFP4" in name for name in counts), reason)  # fmt: skip


def modelopt_kv_cache(declared: Config) -> str | None:
    """vLLM's KV cache dtype for what ModelOpt declares (vllm 0.32 torch_utils.py:457); None
    without a declaration.
    """
    inner = declared.get("quantization")
    place: Config = inner if isinstance(inner, Mapping) else declared
    for found in (
        place.get("kv_cache_scheme"),
        declared.get("kv_cache_scheme"),
        place.get("kv_cache_quant_algo"),
    ):
        if isinstance(found, Mapping):
            if found.get("type") != "float":
                return None
            if found.get("num_bits") == 8:
                return "fp8_e4m3" if found.get("dynamic") is False else None
            return "nvfp4" if found.get("num_bits") == 4 else None
        if isinstance(found, str):
            return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(found.lower())
    return None


# --- compressed-tensors ---------------------------------------------------------------------------


def _compressed_tensors(declared: Config) -> Scheme:
    groups = [
        group
        for group in (declared.get("config_groups") or {}).values()
        if isinstance(group, Mapping)
    ]
    kinds = [group_kind(group) for group in groups]
    scheme_kv = declared.get("kv_cache_scheme")
    # vllm 0.32 attention.py:263: any scheme there turns an `auto` cache into fp8.
    kv_cache = "fp8" if isinstance(scheme_kv, Mapping) else None
    if not kinds:
        note = "compressed-tensors without config_groups: nothing is quantized"
        return Scheme(
            "compressed-tensors", "compressed-tensors", 16, "bf16", kv_cache, notes=(note,)
        )
    names = list(dict.fromkeys(name for name, _, _ in kinds))
    is_nvfp4 = any(name.startswith("NVFP4") for name in names)
    activations = "+".join(sorted({activation for _, _, activation in kinds}))
    name = names[0] if len(names) == 1 else "+".join(sorted(names))
    detail = str(declared.get("format", ""))
    scheme = Scheme(
        name,
        "compressed-tensors",
        min(bits for _, bits, _ in kinds),
        activations,
        kv_cache,
        detail,
        is_nvfp4=is_nvfp4,
    )
    reason = next((reason for group in groups if (reason := unread_weights(group, detail))), "")
    return replace(scheme, unsupported_reason=reason)


# --- the rest -------------------------------------------------------------------------------------


def _other(method: str, declared: Config) -> Scheme:
    if method not in OTHER_METHODS:
        reason = f"vLLM 0.32 has no quantization method {method!r}"
        return Scheme(method or "unknown", None, 16, "unknown", unsupported_reason=reason)
    fixed_bits, activations, is_supported = OTHER_METHODS[method]
    bits = fixed_bits or _bits(declared)
    name, detail = method, ""
    if method == "awq" or method == "gptq":
        name, detail = f"int{bits}-{method}", f"groups of {declared.get('group_size', '?')}"
    if method == "fp8":
        block = declared.get("weight_block_size")
        detail = (
            f"blocks of {block[0]}x{block[1]}"
            if isinstance(block, list) and len(block) == 2
            else ""
        )
        dynamic = declared.get("activation_scheme", "dynamic")
        detail = f"{detail}, {dynamic} activations".lstrip(", ")
    vllm_name = VLLM_NAMES.get(method, method) if is_supported else None
    reason = "" if is_supported else f"vLLM 0.32 has no {method} loader"
    return Scheme(name, vllm_name, bits, activations, detail=detail, unsupported_reason=reason)


def _bits(declared: Config) -> int:
    if declared.get("load_in_4bit") or declared.get("_load_in_4bit"):
        return 4
    if declared.get("load_in_8bit") or declared.get("_load_in_8bit"):
        return 8
    found = declared.get("bits") or declared.get("w_bit") or declared.get("nbits") or 4
    return int(found) if isinstance(found, (int, float)) else 4


def _cloverlm(config: Config, hf: Config | None, tensors: Tensors | None) -> Scheme:
    """CloverLM: BF16, or packed with tiled scales under ModelOpt's names."""
    packed = tensors is not None and any(name.endswith(".weight_scale_2") for name in tensors)
    if tensors is None:
        packed = hf is not None
    if not packed:
        return Scheme(
            "quartet2-bf16",
            "quartet2",
            16,
            "fp4",
            detail="BF16 weights, quantized when they are loaded",
        )
    note = (
        "its weight_scale tensors are in the 128x4 tiled layout: a ModelOpt reader would permute"
        " them silently"
    )
    reason = (
        ""
        if _text_value(config, "model_type") == "cloverlm"
        else (
            "its scales are in the 128x4 tiled layout, which vLLM 0.32 reads for no such model;"
            " `nibble convert` makes it ModelOpt's"
        )
    )
    return Scheme("quartet2-packed", "quartet2", 4, "fp4", detail="F4 weights, tiled E4M3 scales",
                  notes=(note,), is_nvfp4=True, unsupported_reason=reason)  # fmt: skip


def _no_servers(scheme: Scheme) -> Scheme:
    """CloverLM in a layout that `nibble convert` reads and no server does."""
    if scheme.unsupported_reason:
        return scheme
    reason = "CloverLM is served from BF16 or Quartet II's packed weights"
    if scheme.is_nvfp4:
        reason += "; `nibble convert` makes them with --to quartet-packed"
    return replace(scheme, unsupported_reason=reason)
