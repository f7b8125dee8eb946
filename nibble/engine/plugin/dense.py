"""NVFP4 linear layers of ModelOpt and compressed-tensors checkpoints, with exactly merged global
scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as vllm_scheme,
)
from vllm.model_executor.parameter import PerTensorScaleParameter
from vllm.model_executor.utils import is_weights_pre_processed

from nibble.engine.plugin.kernels import building, is_marlin, nvfp4_linear_kernel
from nibble.engine.plugin.layers import (
    apply_column_scale,
    check_loaded,
    mark_unloaded,
    merge_layer,
    set_column_scale,
)
from nibble.engine.plugin.options import current_options, weights_are_real
from nibble.engine.plugin.require import required, required_of_instances


def modelopt_builders() -> dict[str, Callable[..., ModelOptLinearMethod]]:
    """For modelopt.LINEAR_METHOD_BUILDERS: the checkpoint's algorithm -> builder of a method.

    Raises VllmMismatch.
    """
    _require_methods()

    def build(algorithm: str, config: object, prefix: str) -> ModelOptLinearMethod:
        if current_options().weights_only:
            algorithm = "W4A16_NVFP4"
        return ModelOptLinearMethod(*modelopt.resolve(algorithm, config, prefix))

    return {
        algorithm: lambda config, prefix, algorithm=algorithm: build(algorithm, config, prefix)
        for algorithm in ("NVFP4", "W4A16_NVFP4")
    }


def _require_methods() -> None:
    """Check the names of vLLM that the classes below use."""
    required(modelopt, "resolve", "algo", "subcfg", "prefix")
    method, scheme = modelopt.ModelOptLinearMethod, vllm_scheme.CompressedTensorsW4A4Fp4
    for owner in (method, scheme):
        required(owner, "process_weights_after_loading", "self", "layer")
    required(method, "create_weights")
    required(method, "apply", "self", "layer", "x", "bias")
    required_of_instances(method, "kernel", "akey")
    required(scheme, "__init__", "self", "use_a16")
    shapes = ("input_size_per_partition", "params_dtype")
    required(
        scheme,
        "create_weights",
        "self",
        "layer",
        "output_partition_sizes",
        *shapes,
        "weight_loader",
    )
    required(scheme, "apply_weights", "self", "layer", "x", "bias")
    required_of_instances(scheme, "kernel", "use_a16")


class ModelOptLinearMethod(modelopt.ModelOptLinearMethod):
    """Fixes vLLM's method, which uses the largest weight_scale_2 for every shard (vllm 0.32
    modelopt.py:2062).
    """

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args,
        **kwargs,
    ) -> None:
        with building(sum(output_partition_sizes), input_size_per_partition):
            super().create_weights(
                layer, input_size_per_partition, output_partition_sizes, *args, **kwargs
            )
        self.is_real = weights_are_real()
        mark_unloaded(layer, "weight_scale_2", "input_scale")

    def process_weights_after_loading(self, layer: Any) -> None:
        column_scale = None
        if self.is_real and not is_weights_pre_processed():
            check_loaded(layer, "weight_scale", "weight_scale_2")
            if self.akey is not None:
                check_loaded(layer, "input_scale")
            column_scale = merge_layer(layer, "weight_scale_2", is_marlin(self.kernel))
        super().process_weights_after_loading(layer)
        set_column_scale(layer, column_scale)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return apply_column_scale(layer, self.kernel, super().apply, x, bias)


class CompressedTensorsW4A4Fp4(vllm_scheme.CompressedTensorsW4A4Fp4):
    """Fixes vLLM's scheme, which uses the largest divisor for every shard."""

    def __init__(self, use_a16: bool = False):
        # With BF16 activations, vLLM still loads the input scales of a W4A4 checkpoint.
        self.drops_input_scale = not use_a16 and current_options().weights_only
        self.is_real = weights_are_real()
        super().__init__(use_a16=use_a16 or self.drops_input_scale)

    def create_weights(self, layer: Any, output_partition_sizes: list[int], **kwargs) -> None:
        with building(sum(output_partition_sizes), kwargs["input_size_per_partition"]):
            self.kernel = nvfp4_linear_kernel(self.use_a16)  # vLLM's scheme chose without a shape
        super().create_weights(layer, output_partition_sizes, **kwargs)
        if self.drops_input_scale:
            data = torch.empty(len(output_partition_sizes))
            scale = PerTensorScaleParameter(data=data, weight_loader=kwargs["weight_loader"])
            layer.register_parameter("input_global_scale", scale)
        mark_unloaded(layer, "weight_scale", "weight_global_scale", "input_global_scale")

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.drops_input_scale:
            del layer.input_global_scale
        column_scale = None
        if self.is_real:
            check_loaded(layer, "weight_scale", "weight_global_scale")
            if not self.use_a16:
                check_loaded(layer, "input_global_scale")
            column_scale = merge_layer(
                layer, "weight_global_scale", is_marlin(self.kernel), divisors=True
            )
        super().process_weights_after_loading(layer)
        set_column_scale(layer, column_scale)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return apply_column_scale(layer, self.kernel, super().apply_weights, x, bias)
