"""Reads one group of a compressed-tensors config: the kind of its weights, and vLLM 0.32's support.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def unread_weights(group: Config, packing: object) -> str:
    """Why vLLM 0.32 has no scheme for a group's weights, or "" (compressed_tensors.py:420, 529,
    581, 706).
    """
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return ""
    if weights.get("dynamic"):
        return (
            "its config declares dynamically quantized weights, and vLLM 0.32 reads only stored"
            " scales"
        )
    # Integers may be asymmetric in packed weights and with quantized outputs.
    is_w8a8 = (
        inputs
        and not group.get("output_activations")
        and (group.get("format") or packing) != "pack-quantized"
    )
    is_float = weights.get("type") == "float"
    if weights.get("symmetric") is False and (is_float or is_w8a8):
        kind = "floats" if is_float else "integers with quantized activations"
        return (
            "its config declares asymmetrically quantized weights, which vLLM 0.32 does not read"
            " for"
            f" {kind}"
        )
    return ""


def group_kind(group: Config) -> tuple[str, int, str]:
    """(name, weight bits, activations) of one config group."""
    weights: Config = group.get("weights") or {}
    inputs: Config = group.get("input_activations") or {}
    bits, kind = int(weights.get("num_bits") or 16), weights.get("type")
    activation = "bf16"
    if inputs:
        activation = f"{'fp' if inputs.get('type') == 'float' else 'int'}{inputs.get('num_bits')}"
    # vllm 0.32 compressed_tensors.py recognises NVFP4 by exactly these four.
    if (
        bits == 4
        and kind == "float"
        and weights.get("strategy") == "tensor_group"
        and weights.get("group_size") == 16
    ):
        return (
            {"bf16": "NVFP4A16", "fp4": "NVFP4"}.get(activation, f"NVFP4A-{activation}"),
            4,
            activation,
        )
    if bits == 4 and kind == "float" and weights.get("group_size") == 32:
        return "MXFP4", 4, activation
    if kind == "float":
        strategy = str(weights.get("strategy", ""))
        name = "MXFP8" if weights.get("group_size") == 32 else "FP8"
        return f"{name}_BLOCK" if strategy == "block" else name, bits, activation
    return f"W{bits}A{activation[3:] if activation.startswith('int') else 16}", bits, activation
