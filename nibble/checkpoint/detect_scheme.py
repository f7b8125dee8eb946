"""How a checkpoint's weights are quantized, by its config and by its tensors.

What vLLM 0.32 accepts is in its model_executor/layers/quantization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.checkpoint.compressed_tensors import group_kind, unread_weights
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.modelopt import algorithm_of, from_hf_quant_config, modelopt
from nibble.checkpoint.scheme import QUARTET2_PRODUCER, Config, Scheme, quantization_config

Tensors = Mapping[str, TensorInfo]

PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
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
VLLM_NAMES = {"auto-round": "inc", "fp-quant": "fp_quant"}


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
    """The scheme that the quantization config declares."""
    if declared is None and hf_quant_config is not None:
        return from_hf_quant_config(hf_quant_config, tensors)
    if declared is None:
        return _unquantized(config, tensors)
    if _is_modelopt(declared):
        return modelopt(declared, tensors)
    method = _method(declared)
    return (
        _compressed_tensors(declared) if method == COMPRESSED_TENSORS else _other(method, declared)
    )


def _method(declared: Config) -> str:
    return str(declared.get("quant_method", "")).lower().replace("_", "-")


def _is_modelopt(declared: Config) -> bool:
    method = _method(declared)
    return method.startswith("modelopt") or (not method and bool(algorithm_of(declared)))


def _is_row_major(declared: Config) -> bool:
    """Whether the config declares a layout whose NVFP4 scales lie row by row."""
    return _is_modelopt(declared) or _method(declared) == COMPRESSED_TENSORS


def _producer(declared: Config | None) -> str:
    producer = (declared or {}).get("producer")
    return str(producer.get("name", "")) if isinstance(producer, Mapping) else ""


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
    """CloverLM in a layout that `nibble convert` reads and no server loads."""
    if scheme.unsupported_reason:
        return scheme
    reason = "CloverLM is served from BF16 or Quartet II's packed weights"
    if scheme.is_nvfp4:
        reason += "; `nibble convert` makes them with --to quartet-packed"
    return replace(scheme, unsupported_reason=reason)
