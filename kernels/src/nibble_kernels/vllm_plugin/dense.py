"""NVFP4 linear layers of ModelOpt and compressed-tensors checkpoints with the scales they were quantized with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as vllm_scheme,
)
from vllm.model_executor.parameter import PerTensorScaleParameter
from vllm.model_executor.utils import is_weights_pre_processed

from nibble_kernels.merge import ScaleError, merge_scales
from nibble_kernels.vllm_plugin.kernels import is_marlin
from nibble_kernels.vllm_plugin.options import current_options, weights_are_real

COLUMN_SCALE = "weight_column_scale"  # float32 [N], where a layer needs one


def modelopt_builders() -> dict[str, Callable[..., ModelOptLinearMethod]]:
    """For modelopt.LINEAR_METHOD_BUILDERS: algorithm of the checkpoint -> method of a layer."""

    def build(algorithm: str, config: object, prefix: str) -> ModelOptLinearMethod:
        if current_options().nvfp4_activations == "bf16":
            algorithm = "W4A16_NVFP4"
        return ModelOptLinearMethod(*modelopt.resolve(algorithm, config, prefix))

    return {
        algorithm: lambda config, prefix, algorithm=algorithm: build(algorithm, config, prefix)
        for algorithm in ("NVFP4", "W4A16_NVFP4")
    }


class ModelOptLinearMethod(modelopt.ModelOptLinearMethod):
    """vLLM's method, which takes the largest weight_scale_2 for every shard (vllm 0.32 modelopt.py:2062)."""

    def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
        super().create_weights(layer, *args, **kwargs)
        self.is_real = weights_are_real()
        mark_unloaded(layer, "weight_scale_2", "input_scale")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.is_real and not is_weights_pre_processed():
            check_loaded(layer, "weight_scale", "weight_scale_2")
            if self.akey is not None:
                check_loaded(layer, "input_scale")
            merge_layer(layer, "weight_scale_2", is_marlin(self.kernel))
        super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return apply_column_scale(layer, self.kernel, super().apply, x, bias)


class CompressedTensorsW4A4Fp4(vllm_scheme.CompressedTensorsW4A4Fp4):
    """vLLM's scheme, which takes the smallest multiplier (the largest divisor) for every shard."""

    def __init__(self, use_a16: bool = False):
        # The tensors of a W4A4 checkpoint are loaded all the same when its activations are to stay in BF16.
        self.drops_input_scale = not use_a16 and current_options().nvfp4_activations == "bf16"
        self.is_real = weights_are_real()
        super().__init__(use_a16=use_a16 or self.drops_input_scale)

    def create_weights(self, layer: torch.nn.Module, output_partition_sizes: list[int], **kwargs) -> None:
        super().create_weights(layer, output_partition_sizes, **kwargs)
        if self.drops_input_scale:
            data = torch.empty(len(output_partition_sizes))
            scale = PerTensorScaleParameter(data=data, weight_loader=kwargs["weight_loader"])
            layer.register_parameter("input_global_scale", scale)
        mark_unloaded(layer, "weight_scale", "weight_global_scale", "input_global_scale")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.drops_input_scale:
            del layer.input_global_scale
        if self.is_real:
            check_loaded(layer, "weight_scale", "weight_global_scale")
            if not self.use_a16:
                check_loaded(layer, "input_global_scale")
            merge_layer(layer, "weight_global_scale", is_marlin(self.kernel), divisors=True)
        super().process_weights_after_loading(layer)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return apply_column_scale(layer, self.kernel, super().apply_weights, x, bias)


def mark_unloaded(layer: torch.nn.Module, *names: str) -> None:
    """Fill scales with NaN: vLLM leaves memory as it was, and a scale that no file has would be whatever lay there."""
    for name in names:
        if hasattr(layer, name):
            getattr(layer, name).data.fill_(float("nan"))


def check_loaded(layer: torch.nn.Module, *names: str) -> None:
    """ScaleError with the layer's name for scales that the checkpoint does not have, or has as NaN."""
    for name in names:
        if getattr(layer, name).data.float().isnan().any():
            action = "`nibble inspect` shows what the checkpoint has"
            if "input" in name:
                action = "NIBBLE_NVFP4_ACTIVATIONS=bf16 serves a model without scales for its activations"
            raise ScaleError(
                f"{name_of(layer)}.{name} was not loaded, or is NaN; expected a value for each of the layer's tensors; {action}"
            )


def name_of(layer: torch.nn.Module) -> str:
    """The layer's name in the model, as far as vLLM tells it."""
    return getattr(layer, "prefix", "") or getattr(layer, "layer_name", "") or type(layer).__name__


def merge_layer(layer: torch.nn.Module, name: str, marlin: bool, divisors: bool = False) -> None:
    """One global scale in all places of `layer.<name>`, new block scales, and a column factor where they do not suffice."""
    stored = getattr(layer, name).data
    multipliers = 1 / stored if divisors else stored
    try:
        merged = merge_scales(layer.weight_scale.data, multipliers, layer.logical_widths, marlin)
    except ScaleError as error:
        raise ScaleError(f"{name_of(layer)}.{name}: {error}") from None
    # One of the stored values, so that a divisor is not inverted twice.
    stored.fill_(stored[int((multipliers == merged.global_scale).nonzero()[0])].item())
    layer.weight_scale.data.copy_(merged.scales)
    if merged.column_scale is not None:
        layer.register_parameter(COLUMN_SCALE, Parameter(merged.column_scale, requires_grad=False))


def apply_column_scale(
    layer: torch.nn.Module,
    kernel: object,
    apply: Callable[..., Tensor],
    x: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """`apply` times the column factors, before the bias; a kernel with `fuses_column_scale` has done so itself."""
    column_scale = getattr(layer, COLUMN_SCALE, None)
    if column_scale is None or getattr(kernel, "fuses_column_scale", False):
        return apply(layer, x, bias)
    out = apply(layer, x, None)
    scaled = out * column_scale
    return (scaled if bias is None else scaled + bias).to(out.dtype)
