"""NVFP4 experts of ModelOpt and compressed-tensors checkpoints, with exactly merged global
scales.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as vllm_compressed,
)
from vllm.model_executor.utils import is_weights_pre_processed
from vllm.platforms import current_platform

from nibble.engine.plugin import w4a4
from nibble.engine.plugin.cuda import NibbleCompressedTensorsNvFp4MoE, NibbleModelOptNvFp4MoE
from nibble.engine.plugin.layers import check_loaded, mark_unloaded, merge_experts
from nibble.engine.plugin.options import current_options, weights_are_real
from nibble.engine.plugin.require import required, required_of_instances

NO_BIASES = (
    "vLLM's NVFP4 experts would leave the biases of this model out; NIBBLE_MOE_KERNEL=nibble adds"
    " them on SM90"
)
LINEAR_IN_UP = ("silu", "gelu", "gelu_tanh")  # values of vLLM's MoEActivation; "relu2" has no up


def methods() -> tuple[type, type]:
    """The classes for ModelOpt and for compressed-tensors on this platform. Raises VllmMismatch."""
    _require_methods()
    if current_platform.is_cpu():
        from nibble.engine.plugin import cpu

        return cpu.CpuModelOptNvFp4MoE, cpu.CpuCompressedTensorsNvFp4MoE
    return ModelOptNvFp4FusedMoE, CompressedTensorsW4A4Nvfp4MoEMethod


def _require_methods() -> None:
    """Check the names of vLLM that the classes below and those of experts.py use."""
    required(FusedMoEMethodBase, "__init__", "self", "moe")
    limits = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    required_of_instances(
        FusedMoEConfig, "moe_backend", "has_bias", "is_act_and_mul", "tp_rank", *limits
    )
    required_of_instances(RoutedExperts, "activation", "expert_map", *limits)
    modelopt_method = modelopt.ModelOptNvFp4FusedMoE
    compressed_method = vllm_compressed.CompressedTensorsW4A4Nvfp4MoEMethod
    required(modelopt_method, "__init__", "self", "quant_config", "moe_config")
    required(compressed_method, "__init__", "self", "moe", "layer_name", "use_a16")
    for owner in (modelopt_method, compressed_method):
        required(owner, "create_weights")
        required(owner, "process_weights_after_loading", "self", "layer")
        required_of_instances(owner, "moe", "use_a16", "nvfp4_backend")
    required_of_instances(modelopt_method, "per_token_activation")


class ModelOptNvFp4FusedMoE(modelopt.ModelOptNvFp4FusedMoE):
    """Fixes vLLM's method, which uses gate's global scale for up (vllm 0.32 modelopt.py:1032)."""

    def __new__(cls, quant_config: Any, moe_config: Any) -> Any:
        """nibble's own experts where they are asked for."""
        options = current_options()
        if options.moe_kernel == "nibble":
            use_a16 = options.weights_only or quant_config.quant_method == "W4A16_NVFP4"
            in_fp4 = not use_a16 and w4a4.multiplies_fp4()
            ours = w4a4.NibbleModelOptW4A4MoE if in_fp4 else NibbleModelOptNvFp4MoE
            return ours(quant_config, moe_config)
        return super().__new__(cls)

    def __init__(self, quant_config, moe_config) -> None:
        if current_options().weights_only:
            quant_config = copy.copy(quant_config)
            quant_config.quant_method = "W4A16_NVFP4"
        if moe_config.has_bias:
            raise ValueError(NO_BIASES)
        self.is_real = weights_are_real()
        super().__init__(quant_config=quant_config, moe_config=moe_config)

    def create_weights(self, layer: Any, *args, **kwargs) -> None:
        super().create_weights(layer, *args, **kwargs)
        mark_unloaded(
            layer,
            *(f"{w}_{scale}" for w in ("w13", "w2") for scale in ("weight_scale_2", "input_scale")),
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.is_real and not is_weights_pre_processed():
            check_loaded(layer, "w13_weight_scale_2", "w2_weight_scale_2")
            if not self.use_a16 and not self.per_token_activation:
                check_loaded(layer, "w13_input_scale", "w2_input_scale")
            _merge(self, layer, "weight_scale_2", "input_scale")
        super().process_weights_after_loading(layer)


class CompressedTensorsW4A4Nvfp4MoEMethod(vllm_compressed.CompressedTensorsW4A4Nvfp4MoEMethod):
    """Fixes vLLM's method, which does the same as ModelOpt's, with divisors."""

    def __new__(cls, moe: Any, layer_name: str | None = None, use_a16: bool = False) -> Any:
        """nibble's own experts where they are asked for."""
        options = current_options()
        if options.moe_kernel == "nibble":
            in_fp4 = not (use_a16 or options.weights_only) and w4a4.multiplies_fp4()
            plain = NibbleCompressedTensorsNvFp4MoE
            ours = w4a4.NibbleCompressedTensorsW4A4MoE if in_fp4 else plain
            return ours(moe, layer_name, use_a16)
        return super().__new__(cls)

    def __init__(self, moe, layer_name: str | None = None, use_a16: bool = False) -> None:
        use_a16 = use_a16 or current_options().weights_only
        if moe.has_bias:
            raise ValueError(NO_BIASES)
        self.is_real = weights_are_real()
        super().__init__(moe, layer_name, use_a16=use_a16)

    def create_weights(self, layer: Any, *args, **kwargs) -> None:
        super().create_weights(layer, *args, **kwargs)
        scales = ("weight_global_scale", "input_global_scale")
        mark_unloaded(layer, *(f"{w}_{scale}" for w in ("w13", "w2") for scale in scales))

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.is_real:
            check_loaded(layer, "w13_weight_global_scale", "w2_weight_global_scale")
            if not self.use_a16:
                check_loaded(layer, "w13_input_global_scale", "w2_input_global_scale")
            _merge(self, layer, "weight_global_scale", "input_global_scale", divisors=True)
        super().process_weights_after_loading(layer)


def _merge(method, layer: Any, global_name: str, input_name: str, divisors: bool = False) -> None:
    merge_experts(
        layer,
        global_name,
        None if method.use_a16 else input_name,
        gated=method.moe.is_act_and_mul,
        linear_in_up=_is_linear_in_up(method, layer),
        marlin=method.nvfp4_backend == NvFp4MoeBackend.MARLIN,
        divisors=divisors,
    )


def _is_linear_in_up(method, layer: Any) -> bool:
    limits = (getattr(layer, "swiglu_limit", None), getattr(method.moe, "swiglu_limit", None))
    return layer.activation.value in LINEAR_IN_UP and all(limit is None for limit in limits)
