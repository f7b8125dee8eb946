"""Fused NVFP4 linear layers of a tree, created, loaded and processed by its own code: what
weight do they multiply with?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from nibble.engine.patching.probe import Finding, defect, sound
from nibble.engine.patching.tree import Tree
from probes.support import plugin
from probes.support.nvfp4 import (
    SOUND_ERROR,
    Packed,
    dequantize,
    normal_weights,
    quantize,
    shard_errors,
)
from probes.support.syntax import Sources

if TYPE_CHECKING:
    import torch

LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization"
MODELOPT = f"{QUANTIZATION}.modelopt"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4.CompressedTensorsW4A4Fp4"  # noqa: E501
LINEAR = "vllm.model_executor.kernels.linear"
EMULATION = f"{LINEAR}.nvfp4.emulation.EmulationNvFp4LinearKernel"
# With 6 as divisor of the activations the rows of an identity are quantized exactly: amax 1, block
# scale 1, code 6, value 6/6.
INPUT_DIVISOR = 6.0
QKV = ((256, 0.02), (64, 0.08), (64, 0.01))  # rows and standard deviation of the shards
MakeLayer = Callable[[Sources, Sequence[Packed], bool], "tuple[Any, torch.nn.Module]"]


def emulated(tree: Tree) -> Sources:
    """The tree on a machine without an FP4 kernel, so that NVFP4 layers run through its own
    emulation on the CPU.
    """
    given: dict[str, Any] = {
        "vllm.envs": SimpleNamespace(
            VLLM_USE_NVFP4_CT_EMULATIONS=True, VLLM_NVFP4_GEMM_BACKEND=None, VLLM_USE_FBGEMM=False
        ),
        "vllm.distributed.get_tensor_model_parallel_rank": lambda: 0,
        "vllm.distributed.get_tensor_model_parallel_world_size": lambda: 1,
        "vllm.config.get_current_vllm_config_or_none": lambda: None,
        # A pydantic class, which needs its whole module
        "vllm.config.quantization.QuantSpec": SimpleNamespace,
        # 0.15.1 asks for a GPU kernel before it emulates
        "vllm.utils.flashinfer.has_flashinfer": lambda: True,
    }
    sources = Sources(tree, given)
    platform = sources.load("vllm.platforms.interface.UnspecifiedPlatform")
    sources.given["vllm.platforms.current_platform"] = platform()
    if sources.has(EMULATION):
        kernel, config = (
            sources.load(EMULATION),
            sources.load(f"{LINEAR}.nvfp4.base.NvFp4LinearLayerConfig"),
        )
        sources.given[f"{LINEAR}.init_nvfp4_linear_kernel"] = lambda use_a16=False: kernel(config())
    return sources


def modelopt_layer(
    sources: Sources, shards: Sequence[Packed], merged: bool, algorithm: str = "NVFP4"
) -> tuple[Any, torch.nn.Module]:
    """Method and layer of a ModelOpt checkpoint, W4A4 unless the algorithm says otherwise;
    `merged` by nibble's plugin or not.
    """
    scales = {
        "weight_scale_2": [s.scale_2 for s in shards],
        "input_scale": [1 / INPUT_DIVISOR] * len(shards),
    }
    if not sources.has(f"{MODELOPT}.resolve"):
        config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)
        method = sources.load(f"{MODELOPT}.ModelOptNvFp4LinearMethod")(config)
        return method, _processed(
            method, shards, "weight", scales, "weight_scale_2" if merged else ""
        )
    spec, context, format_scheme = sources.load(f"{MODELOPT}.resolve")(
        algorithm, SimpleNamespace(group_size=16), "qkv_proj"
    )
    method = sources.load(f"{MODELOPT}.ModelOptLinearMethod")(spec, context, format_scheme)
    return method, _processed(method, shards, "weight", scales, "weight_scale_2" if merged else "")


def modelopt_w4a16_layer(
    sources: Sources, shards: Sequence[Packed], merged: bool
) -> tuple[Any, torch.nn.Module]:
    """Method and layer of a weight-only ModelOpt checkpoint; W4A4 where the release has no such
    format.
    """
    return modelopt_layer(sources, shards, merged, "W4A16_NVFP4")


def compressed_tensors_layer(
    sources: Sources, shards: Sequence[Packed], merged: bool
) -> tuple[Any, torch.nn.Module]:
    """Method and layer of a compressed-tensors W4A4 checkpoint, which stores the scales as
    divisors.
    """
    method = sources.load(COMPRESSED)()
    scales = {
        "weight_global_scale": [1 / s.scale_2 for s in shards],
        "input_global_scale": [INPUT_DIVISOR] * len(shards),
    }
    return method, _processed(
        method, shards, "weight_packed", scales, "weight_global_scale" if merged else ""
    )


def _processed(
    method: Any, shards: Sequence[Packed], weight: str, scales: dict[str, list[float]], merge: str
) -> torch.nn.Module:
    """A layer made by create_weights, filled as the loader fills it, its scales `merge` merged
    by the plugin, and processed.
    """
    import torch

    rows, columns = [s.codes.shape[0] for s in shards], shards[0].codes.shape[1] * 2
    layer = torch.nn.Module()
    method.create_weights(
        layer, input_size_per_partition=columns, output_partition_sizes=rows, input_size=columns,
        output_size=sum(rows), params_dtype=torch.float32, weight_loader=None,
    )  # fmt: skip
    loaded = {
        weight: torch.cat([s.codes for s in shards]),
        "weight_scale": torch.cat([s.scales for s in shards]),
    }
    loaded |= {name: torch.tensor(values) for name, values in scales.items()}
    for name, value in loaded.items():
        layer.get_parameter(name).data.copy_(value)
    factors = None
    if merge:
        layer.logical_widths = rows
        factors = plugin.plugin_layers().merge_layer(
            layer, merge, marlin=False, divisors=merge == "weight_global_scale"
        )
    with mock.patch.object(
        torch.Tensor, "cuda", lambda tensor: tensor
    ):  # swizzle_blockscale asks for it anywhere: N28
        method.process_weights_after_loading(layer)
    plugin.plugin_layers().set_column_scale(layer, factors)
    return layer


def multiplied_weight(method: Any, layer: Any) -> torch.Tensor:
    """The weight as the layer's output for an identity, so that whatever the tree does on the
    way is in it.
    """
    import torch

    apply = getattr(method, "apply_weights", None) or method.apply
    return (
        plugin.plugin_layers()
        .apply_column_scale(layer, None, apply, torch.eye(layer.input_size_per_partition), None)
        .T
    )


def _unswizzled(scale: torch.Tensor) -> torch.Tensor:
    import torch

    return scale.as_subclass(torch.Tensor)


def _stored_weight(layer: Any) -> torch.Tensor:
    """The weight as the processed tensors say it."""
    column = layer.weight_column_scale[:, None] if hasattr(layer, "weight_column_scale") else 1
    if hasattr(
        layer, "weight_packed"
    ):  # compressed-tensors in 0.15.1 keeps its names, and divisors
        return column * dequantize(
            layer.weight_packed.data, layer.weight_scale.data, 1 / layer.weight_global_scale
        )
    scale = (
        layer.weight_global_scale if hasattr(layer, "weight_global_scale") else layer.weight_scale_2
    )
    return column * dequantize(layer.weight.data, layer.weight_scale.data, scale)


def merge_finding(
    tree: Tree, make_layer: MakeLayer, emulate: bool = True, merged: bool = False
) -> Finding:
    """Fuse q, k and v of different sizes, `merged` by nibble's plugin or not, and compare each
    shard with its own values.

    Read through the tree's emulation, or where that is broken (row 3), missing or not asked for,
    from the processed tensors.
    """
    sources = emulated(tree)
    shards = [quantize(weight) for weight in normal_weights(*QKV)]
    if emulate and sources.has(EMULATION):
        weight = multiplied_weight(*make_layer(sources, shards, merged))
    else:
        # 0.15.1 swizzles block scales for its kernels, which cannot run here: the rows stay as they
        # are.
        sources.given[f"{QUANTIZATION}.utils.quant_utils.swizzle_blockscale"] = _unswizzled
        weight = _stored_weight(make_layer(sources, shards, merged)[1])
    errors = shard_errors(weight, shards)
    detail = "relative error of q, k, v: " + ", ".join(f"{error:.3g}" for error in errors)
    return sound(detail) if max(errors) < SOUND_ERROR else defect(detail)
