"""Base classes of experts that nibble's kernels compute, on the CPU and on GPUs.

They replace vLLM's methods, which choose among vLLM's GPU kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as vllm_compressed,
)
from vllm.model_executor.utils import set_weight_attrs

from nibble.engine.plugin.layers import check_loaded, mark_unloaded
from nibble.engine.plugin.options import current_options, weights_are_real


class Experts(FusedMoEMethodBase):
    """NVFP4 experts.

    Subclasses in this module have the checkpoints' names of tensors. Subclasses for a device
    implement `prepare` and `apply`.
    """

    supports_pre_processed_weights = False
    per_token_activation = False
    use_global_sf = False  # input scales are only those of this rank's experts
    takes_biases = False
    use_a16: bool  # activations stay in BF16
    where: str  # for errors, such as "on the CPU"

    def _start(self, moe: FusedMoEConfig, use_a16: bool) -> None:
        """Replaces vLLM's constructors, which choose among GPU kernels. Raises ValueError."""
        FusedMoEMethodBase.__init__(self, moe)
        if moe.has_bias and not self.takes_biases:
            raise ValueError(f"NVFP4 experts with biases are not supported {self.where}")
        self.use_a16 = use_a16 or current_options().weights_only
        self.is_real = weights_are_real()

    def prepare(
        self, layer: Any, global_scales: tuple[Tensor, Tensor], input_scales: tuple[Tensor, Tensor]
    ) -> None:
        """Prepare the layer for the kernel. Both arguments are multipliers of (w13, w2).

        w13's are [E, 2] for gate and up, or [E, 1] without gate; w2's are [E].
        """
        raise NotImplementedError

    def _create_biases(self, layer: Any, weights: tuple[Tensor, Tensor], loader: Any) -> None:
        """As gpt-oss has them: vLLM's NVFP4 methods create none, its loaders fill parameters of
        these names (vllm 0.32 gpt_oss.py:1235, routed_experts.py:784).
        """
        if not self.moe.has_bias:
            return
        for name, weight in zip(("w13_bias", "w2_bias"), weights, strict=True):
            values = torch.full(weight.shape[:2], float("nan"), dtype=torch.bfloat16)
            bias = Parameter(values.to(weight.device), requires_grad=False)
            layer.register_parameter(name, bias)
            set_weight_attrs(bias, {"weight_loader": loader})

    def _check(self, layer: torch.nn.Module, weight_scale: str, input_scale: str) -> None:
        if self.is_real:
            check_loaded(layer, *_both("weight_scale"), *_both(weight_scale))
            if not self.use_a16:
                check_loaded(layer, *_both(input_scale))

    @property
    def supports_eplb(self) -> bool:
        """False: vLLM refuses EPLB by the name of the method (vllm 0.32 routed_experts.py:180)."""
        return False

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: only vLLM's kernels use it."""


class ModelOptExperts(Experts, modelopt.ModelOptNvFp4FusedMoE):
    """Experts of ModelOpt checkpoints.

    vLLM's loader checks that the name of the class contains "ModelOpt" (vllm 0.32
    routed_experts.py:826).
    """

    def __init__(
        self, quant_config: modelopt.ModelOptNvFp4Config, moe_config: FusedMoEConfig
    ) -> None:
        if quant_config.moe_activation_override is not None:
            raise ValueError(
                f"activations of experts as {quant_config.moe_activation_override} are not"
                f" supported {self.where}"
            )
        self.quant_config = quant_config
        self._start(moe_config, quant_config.quant_method == "W4A16_NVFP4")

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        mark_unloaded(
            layer, *_both("weight_scale"), *_both("weight_scale_2"), *_both("input_scale")
        )
        weights = (layer.w13_weight, layer.w2_weight)
        self._create_biases(layer, weights, kwargs.get("weight_loader"))

    def process_weights_after_loading(self, layer: Any) -> None:
        self._check(layer, "weight_scale_2", "input_scale")
        self.prepare(
            layer,
            (layer.w13_weight_scale_2, layer.w2_weight_scale_2),
            (layer.w13_input_scale, layer.w2_input_scale),
        )


class CompressedTensorsExperts(Experts, vllm_compressed.CompressedTensorsW4A4Nvfp4MoEMethod):
    """Experts of compressed-tensors checkpoints, whose global scales are divisors."""

    def __init__(
        self, moe: FusedMoEConfig, layer_name: str | None = None, use_a16: bool = False
    ) -> None:
        self.group_size = 16
        self._start(moe, use_a16)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        mark_unloaded(
            layer,
            *_both("weight_scale"),
            *_both("weight_global_scale"),
            *_both("input_global_scale"),
        )
        weights = (layer.w13_weight_packed, layer.w2_weight_packed)
        self._create_biases(layer, weights, kwargs.get("weight_loader"))

    def process_weights_after_loading(self, layer: Any) -> None:
        self._check(layer, "weight_global_scale", "input_global_scale")
        layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed
        del layer.w13_weight_packed, layer.w2_weight_packed
        self.prepare(
            layer,
            (1 / layer.w13_weight_global_scale, 1 / layer.w2_weight_global_scale),
            (1 / layer.w13_input_global_scale, 1 / layer.w2_input_global_scale),
        )


def local_ids(layer: Any, topk_ids: Tensor) -> Tensor:
    """Ids of experts as indices into this rank's weights; negative for experts of other ranks."""
    if layer.expert_map is None:
        return topk_ids
    return torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.clamp(min=0).long()])


def swiglu(layer: torch.nn.Module, moe: FusedMoEConfig, name: str) -> float | None:
    """The layer's parameter swiglu_<name>, else the model's, as in vLLM 0.32
    (fused_moe/activation.py:194).
    """
    value = getattr(layer, f"swiglu_{name}", None)
    return value if value is not None else getattr(moe, f"swiglu_{name}", None)


def _both(name: str) -> tuple[str, str]:
    return f"w13_{name}", f"w2_{name}"
