"""NVFP4 on vLLM's CPU platform, for which vLLM 0.32 has no kernel (kernels/linear/__init__.py:574, fused_moe/oracle/nvfp4.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as vllm_compressed,
)
from vllm.platforms import current_platform

from nibble_kernels.nvfp4_linear import nvfp4_linear
from nibble_kernels.nvfp4_moe import activation_of, nvfp4_moe
from nibble_kernels.vllm_plugin.layers import check_loaded, mark_unloaded
from nibble_kernels.vllm_plugin.options import current_options, weights_are_real


class CpuNvFp4LinearKernel(NvFp4LinearKernel):
    """nibble::nvfp4_linear on a layer's tensors as the checkpoint has them.

    W4A4 where the layer has `input_global_scale_inv`, W4A16 where it does not. `weight_column_scale`, float32 [N], is
    applied where the layer has it.
    """

    fuses_column_scale = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "it is for the CPU platform"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: codes and scales are read in the checkpoint's own layout."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nvfp4_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            column_scale=getattr(layer, "weight_column_scale", None),
            bias=bias,
            input_scale_inv=getattr(layer, "input_global_scale_inv", None),
        )


class _CpuExperts(FusedMoEMethodBase):
    """nibble::nvfp4_moe on a layer's tensors; the subclasses know the names that checkpoints give them."""

    supports_pre_processed_weights = False
    per_token_activation = False
    use_global_sf = False  # input scales of this rank's experts alone
    use_a16: bool

    def _start(self, moe: FusedMoEConfig, use_a16: bool) -> None:
        """In place of vLLM's constructors, which choose among GPU kernels."""
        FusedMoEMethodBase.__init__(self, moe)
        if moe.has_bias:
            raise ValueError("NVFP4 experts with biases are not supported on the CPU")
        self.use_a16 = use_a16 or current_options().weights_only
        self.is_real = weights_are_real()

    def _check(self, layer: torch.nn.Module, weight_scale: str, input_scale: str) -> None:
        if self.is_real:
            check_loaded(layer, *_both("weight_scale"), *_both(weight_scale))
            if not self.use_a16:
                check_loaded(layer, *_both(input_scale))

    def _finish(
        self, layer: Any, global_scales: tuple[Tensor, Tensor], input_scales: tuple[Tensor, Tensor]
    ) -> None:
        """Multipliers: of w13 [E, 2] or, without gate, [E, 1], and of w2 [E]; of their inputs likewise.

        gate and up have one input, so the larger scale serves both, as vLLM has it.
        """
        self.swiglu = {name: _swiglu(layer, self.moe, name) for name in ("limit", "alpha", "beta")}
        activation_of(layer.activation.value, **self.swiglu)
        layer.w13_global_scale, layer.w2_global_scale = (_constant(scale) for scale in global_scales)
        if not self.use_a16:
            w13, w2 = input_scales
            layer.w13_input_multiplier, layer.w2_input_multiplier = _constant(w13.amax(1)), _constant(w2)

    @property
    def supports_eplb(self) -> bool:
        return False

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: it is for vLLM's own kernels."""

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: object, **rest: object
    ) -> Tensor:
        """The routed experts' sum; shared experts have been computed by the runner (vllm 0.32 moe_runner.py:617)."""
        if layer.expert_map is not None:
            topk_ids = torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.clamp(min=0).long()])
        return nvfp4_moe(
            x,
            topk_weights,
            topk_ids,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_global_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_global_scale,
            layer.activation.value,
            w13_input_scale=getattr(layer, "w13_input_multiplier", None),
            w2_input_scale=getattr(layer, "w2_input_multiplier", None),
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            swiglu_limit=self.swiglu["limit"],
            swiglu_alpha=self.swiglu["alpha"],
            swiglu_beta=self.swiglu["beta"],
        )


class CpuModelOptNvFp4MoE(_CpuExperts, modelopt.ModelOptNvFp4FusedMoE):
    """Experts of ModelOpt checkpoints on the CPU. (vLLM's loader asks for "ModelOpt" in the name: routed_experts.py:826.)"""

    def __init__(self, quant_config: modelopt.ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> None:
        if quant_config.moe_activation_override is not None:
            raise ValueError(
                f"activations of experts as {quant_config.moe_activation_override} are not supported on the CPU"
            )
        self.quant_config = quant_config
        self._start(moe_config, quant_config.quant_method == "W4A16_NVFP4")

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        mark_unloaded(layer, *_both("weight_scale"), *_both("weight_scale_2"), *_both("input_scale"))

    def process_weights_after_loading(self, layer: Any) -> None:
        self._check(layer, "weight_scale_2", "input_scale")
        self._finish(
            layer,
            (layer.w13_weight_scale_2, layer.w2_weight_scale_2),
            (layer.w13_input_scale, layer.w2_input_scale),
        )


class CpuCompressedTensorsNvFp4MoE(_CpuExperts, vllm_compressed.CompressedTensorsW4A4Nvfp4MoEMethod):
    """Experts of compressed-tensors checkpoints on the CPU; their global scales are divisors."""

    def __init__(self, moe: FusedMoEConfig, layer_name: str | None = None, use_a16: bool = False) -> None:
        self.group_size = 16
        self._start(moe, use_a16)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        mark_unloaded(
            layer, *_both("weight_scale"), *_both("weight_global_scale"), *_both("input_global_scale")
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        self._check(layer, "weight_global_scale", "input_global_scale")
        layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed
        self._finish(
            layer,
            (1 / layer.w13_weight_global_scale, 1 / layer.w2_weight_global_scale),
            (1 / layer.w13_input_global_scale, 1 / layer.w2_input_global_scale),
        )


def _both(name: str) -> tuple[str, str]:
    return f"w13_{name}", f"w2_{name}"


def _constant(value: Tensor) -> Parameter:
    return Parameter(value.detach().clone(), requires_grad=False)


def _swiglu(layer: torch.nn.Module, moe: FusedMoEConfig, name: str) -> float | None:
    """The layer's own parameter, or the model's, as vLLM has it (fused_moe/activation.py:194)."""
    own = getattr(layer, f"swiglu_{name}", None)
    return own if own is not None else getattr(moe, f"swiglu_{name}", None)
