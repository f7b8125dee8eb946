"""Rows about NVFP4 checkpoints."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.bad_input.case import Case, Place, Row, row, serve
from tests.support.models.tiny_checkpoint import (
    LINEAR_SHAPES,
    OTHER_FAMILY,
    Tensors,
    linear,
    tensors,
    write_checkpoint,
)
from tests.support.models.tiny_model import MODELOPT_NVFP4

UP = "model.layers.0.mlp.up_proj"
GATE = "model.layers.0.mlp.gate_proj"
BROKEN = "{tmp}/broken"
CACHE = "model.layers.0.self_attn.k_proj.k_scale"
WIDE = (256, 512)  # whole 128x4 tiles of scales


def legacy(algorithm: str, **more: Any) -> dict[str, Any]:
    """hf_quant_config.json of an algorithm."""
    inner = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner | more}


def checkpoint(
    change: Callable[[Tensors], Any] = lambda _: None,
    values: Mapping[str, bytes] | None = None,
    declared: Mapping[str, Any] | None = MODELOPT_NVFP4,
    hf_quant_config: Mapping[str, Any] | None = None,
    **config: Any,
) -> Callable[[Place], Any]:
    """Write an NVFP4 checkpoint with changed tensors or values to {tmp}/broken."""

    def prepare(place: Place) -> None:
        weights = tensors("nvfp4")
        change(weights)
        given = config | ({"quantization_config": declared} if declared else {})
        write_checkpoint(place.tmp / "broken", weights, given, hf_quant_config, values)

    return prepare


def _without(*leaves: str) -> Callable[[Tensors], Any]:
    return lambda weights: [weights.pop(f"{UP}.{leaf}") for leaf in leaves]


def _stored(leaf: str, dtype: str, shape: list[int]) -> Callable[[Tensors], Any]:
    return lambda weights: weights.update({f"{UP}.{leaf}": (dtype, shape)})


def _replaced(weights: Tensors, module: str, form: str) -> None:
    for name in [name for name in weights if name.startswith(f"{module}.")]:
        del weights[name]
    weights.update(linear(module, *LINEAR_SHAPES[module.removeprefix("model.layers.0.")], form))


def _wide(weights: Tensors) -> None:
    for name in (GATE, UP):
        weights.update(linear(name, *WIDE, "nvfp4"))


def _second_layer(weights: Tensors) -> None:
    first = {
        name: tensor
        for name, tensor in weights.items()
        if ".layers.0." in name and ".o_proj." not in name
    }
    weights.update(
        {name.replace(".layers.0.", ".layers.1."): tensor for name, tensor in first.items()}
    )


def _cache_scale(weights: Tensors) -> None:
    weights[CACHE] = ("F32", [])


def _fp8(weights: Tensors) -> None:
    for name in (GATE, UP):
        for leaf in ("weight_scale_2", "weight_scale"):
            del weights[f"{name}.{leaf}"]
        weights.update(linear(name, 128, 64, "fp8"))


def _mixed_with_fp8() -> dict[str, Any]:
    algorithms = {f"model.layers.0.{name}": "NVFP4" for name in LINEAR_SHAPES} | {
        GATE: "FP8",
        UP: "FP8",
    }
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _tiled() -> dict[str, bytes]:
    """Scales whose rows differ, in the 128x4 layout: tile after tile, in each the rows 32 apart
    side by side.
    """
    source = random.Random(0)
    rows, blocks = WIDE[0], WIDE[1] // 16
    means = [source.randrange(40, 80) for _ in range(rows)]
    places = [
        (band * 128 + quarter * 32 + low)
        for band in range(rows // 128)
        for _ in range(blocks // 4)
        for low in range(32)
        for quarter in range(4)
        for _ in range(4)
    ]
    stored = bytes(means[place] + source.randrange(-3, 4) for place in places)
    return {f"{name}.weight_scale": stored for name in (GATE, UP)}


def _compressed(**change: Any) -> dict[str, Any]:
    four = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    group = {"targets": ["Linear"], "weights": four | change}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }


def _flipped(byte: int) -> dict[str, bytes]:
    return {f"{UP}.weight_scale": b"\x38" * 300 + bytes([byte]) + b"\x38" * 211}


def nvfp4_rows() -> list[Row]:
    """Checkpoints that would compute wrongly, each refused before anything is loaded."""
    return [*_damaged_rows(), *_unservable_rows()]


def _damaged_rows() -> list[Row]:
    return [
        row(
            "nvfp4-nan",
            "a NaN among the block scales of an NVFP4 weight (a flipped bit, or ModelOpt before"
            " 0.45 with an old torch)",
            4,
            f"{UP}.weight_scale in …/model.safetensors has a NaN scale, byte 0x7f at element"
            " 300; …",
            serve(BROKEN, prepare=checkpoint(values=_flipped(0x7F))),
        ),
        row(
            "nvfp4-negative",
            "a negative block scale",
            4,
            f"{UP}.weight_scale in …/model.safetensors has a negative scale, byte 0xb8 at element"
            " 300; …",
            serve(BROKEN, prepare=checkpoint(values=_flipped(0xB8))),
        ),
        row(
            "nvfp4-global-scale",
            "an fp32 scale that is zero, negative, infinite or NaN",
            4,
            f"{UP}.weight_scale_2 in …/model.safetensors is …; expected a finite number above 0; …",
            *(
                serve(
                    BROKEN,
                    prepare=checkpoint(values={f"{UP}.weight_scale_2": struct.pack("<f", value)}),
                )
                for value in (0.0, -1.0, float("inf"), float("nan"))
            ),
        ),
        *(
            row(
                f"nvfp4-no-{leaf}",
                f"an NVFP4 weight without its `{leaf}`"
                + (", where others have one" if leaf == "input_scale" else ""),
                4,
                f"{UP}.{leaf} in …/model.safetensors is missing; expected …",
                serve(BROKEN, prepare=checkpoint(_without(leaf))),
                Case(("plan", BROKEN), {}, checkpoint(_without(leaf))),
            )
            for leaf in ("weight_scale", "weight_scale_2", "input_scale")
        ),
        row(
            "nvfp4-scale-shape",
            "block scales of another shape than their weight",
            4,
            f"{UP}.weight_scale in …/model.safetensors has shape [64, 4]; expected [128, 4]; …",
            serve(BROKEN, prepare=checkpoint(_stored("weight_scale", "F8_E4M3", [64, 4]))),
        ),
        row(
            "layer-tensor-missing",
            "a tensor that one layer lacks and the others have (families that"
            " `nibble/checkpoint/layer_tensors.json` lists)",
            4,
            "model.layers.1.self_attn.o_proj.weight in …/broken is missing; expected it in every"
            " layer, as in layer 0; …",
            serve(BROKEN, prepare=checkpoint(_second_layer, num_hidden_layers=2)),
        ),
        row(
            "size-contradicts",
            "a size in config.json that the tensors contradict, or a weight that is a row short",
            4,
            "model.layers.0.mlp.gate_proj.weight in …/model.safetensors is a weight of shape [128,"
            " 64]…; expected [96, 64] (intermediate_size, hidden_size of config.json); …",
            serve(BROKEN, prepare=checkpoint(intermediate_size=96)),
        ),
        row(
            "size-no-number",
            "a size in config.json that is not a whole number above 0",
            4,
            "hidden_size in …/broken/config.json is …; expected a whole number above 0; …",
            *(serve(BROKEN, prepare=checkpoint(hidden_size=value)) for value in (-1, "64", None)),
        ),
        row(
            "global-scale-reciprocal",
            "a global scale that makes weights no model has, such as its reciprocal",
            4,
            f"{UP}.weight_scale_2 in …/model.safetensors is 2.688e+04, which makes weights of up to"
            " … with its block scales; …",
            serve(
                BROKEN,
                prepare=checkpoint(values={f"{UP}.weight_scale_2": struct.pack("<f", 26880.0)}),
            ),
        ),
        row(
            "cache-scale",
            "a `k_scale` or `v_scale` that is NaN, zero or negative",
            4,
            "model.layers.0.self_attn.k_proj.k_scale in …/model.safetensors is …; expected a finite"
            " number above 0; …",
            *(
                serve(BROKEN, prepare=checkpoint(_cache_scale, {CACHE: struct.pack("<f", value)}))
                for value in (0.0, -1.0, float("nan"))
            ),
        ),
        row(
            "zero-norm",
            "a norm of zeros in a family whose norms multiply by it",
            4,
            "model.norm.weight in …/model.safetensors holds only zeros; expected factors other than"
            " 0; …",
            serve(BROKEN, prepare=checkpoint(values={"model.norm.weight": bytes(128)})),
        ),
    ]


def _unservable_rows() -> list[Row]:
    return [
        row(
            "nvfp4-group-size",
            "NVFP4 with another group size than 16, by its tensors",
            5,
            f"{UP}.weight_scale in …/model.safetensors has one scale for 32 weights (shape [128,"
            " 2]); expected groups of 16…",
            serve(BROKEN, prepare=checkpoint(_stored("weight_scale", "F8_E4M3", [128, 2]))),
        ),
        row(
            "nvfp4-declared-group-size",
            "the same, by its config",
            5,
            "… is NVFP4: its config says groups of 32, and NVFP4 has groups of 16; …",
            serve(BROKEN, prepare=checkpoint(declared=MODELOPT_NVFP4 | {"group_size": 32})),
        ),
        row(
            "nvfp4-tiled",
            "block scales in the 128x4 tiled layout under ModelOpt's label",
            5,
            "….weight_scale in …/model.safetensors holds its scales in 128x4 tiles, by their values"
            " (1 more like it); expected scales row by row, as its config says; …",
            serve(BROKEN, prepare=checkpoint(_wide, _tiled(), **OTHER_FAMILY)),
        ),
        row(
            "nvfp4-fused-formats",
            "a layer that vLLM fuses (q/k/v, gate/up, experts) with parts in NVFP4 and others in"
            " another format",
            5,
            f"{UP}.weight in …/model.safetensors is BF16, and {GATE} is NVFP4; expected one format"
            " for all of …; …",
            serve(BROKEN, prepare=checkpoint(lambda weights: _replaced(weights, UP, "bf16"))),
            Case(("plan", BROKEN), {}, checkpoint(lambda weights: _replaced(weights, UP, "bf16"))),
        ),
        row(
            "nvfp4-no-algorithm",
            "a ModelOpt config without `quant_algo`, or with `quantization: null`",
            5,
            "… is modelopt: its quantization config names no quant_algo; …",
            serve(
                BROKEN, prepare=checkpoint(declared=None, hf_quant_config={"quantization": None})
            ),
        ),
        row(
            "nvfp4-unknown-algorithm",
            "a ModelOpt algorithm that vLLM 0.32 does not have, in config.json or in"
            " hf_quant_config.json alone",
            5,
            "… is NVFP4_AWQ: vLLM 0.32 reads these ModelOpt algorithms: …",
            serve(
                BROKEN, prepare=checkpoint(declared=MODELOPT_NVFP4 | {"quant_algo": "NVFP4_AWQ"})
            ),
            serve(BROKEN, prepare=checkpoint(declared=None, hf_quant_config=legacy("NVFP4_AWQ"))),
        ),
        row(
            "fp8-on-cpu",
            "FP8 beside NVFP4, or alone, whose fused layers have parts with different scales, on"
            " the CPU",
            5,
            f"{GATE}.weight_scale and {UP}.weight_scale of … differ, and vLLM 0.32 fuses their FP8"
            " layers; …",
            serve(
                BROKEN,
                prepare=checkpoint(
                    _fp8, {f"{UP}.weight_scale": struct.pack("<f", 0.5)}, _mixed_with_fp8()
                ),
            ),
        ),
        row(
            "compressed-dynamic",
            "compressed-tensors whose config says that weights are quantized dynamically or"
            " asymmetrically",
            5,
            "… its config declares … quantized weights, … vLLM 0.32 …",
            *(
                serve(BROKEN, prepare=checkpoint(declared=_compressed(**change)))
                for change in ({"dynamic": True}, {"symmetric": False})
            ),
        ),
        row(
            "nvfp4-undeclared",
            "packed NVFP4 weights and no file that says so",
            5,
            "… is NVFP4: its config.json has no quantization_config; …",
            serve(BROKEN, prepare=checkpoint(declared=None)),
        ),
    ]
