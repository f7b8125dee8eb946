"""nibble's NVFP4 kernels on vLLM's CPU platform, for which vLLM 0.32 has none
(kernels/linear/__init__.py:574, fused_moe/oracle/nvfp4.py).
"""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.nvfp4_linear import nvfp4_linear
from nibble_kernels.nvfp4_moe import activation_of, nvfp4_moe
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.platforms import current_platform

from nibble.engine.contract import CPU_EXPERTS, CPU_LINEAR, reported_as
from nibble.engine.plugin.experts import (
    CompressedTensorsExperts,
    Experts,
    ModelOptExperts,
    local_ids,
    swiglu,
)


@reported_as(CPU_LINEAR)
class CpuNvFp4LinearKernel(NvFp4LinearKernel):
    """nibble::nvfp4_linear on a layer's tensors in the layout of the checkpoint.

    W4A4 if the layer has `input_global_scale_inv`, else W4A16. Applies `weight_column_scale`,
    float32 [N], if the layer has it.
    """

    fuses_column_scale = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "it is for the CPU platform"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the kernel reads the checkpoint's layout."""

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


class _CpuExperts(Experts):
    """nibble::nvfp4_moe on a layer's tensors in the layout of the checkpoint."""

    where = "on the CPU"

    def prepare(
        self, layer: Any, global_scales: tuple[Tensor, Tensor], input_scales: tuple[Tensor, Tensor]
    ) -> None:
        """Store the multipliers. gate and up share an input, so the larger scale counts."""
        self.swiglu = {name: swiglu(layer, self.moe, name) for name in ("limit", "alpha", "beta")}
        activation_of(layer.activation.value, **self.swiglu)
        layer.w13_global_scale, layer.w2_global_scale = (
            _constant(scale) for scale in global_scales
        )
        if not self.use_a16:
            w13, w2 = input_scales
            layer.w13_input_multiplier = _constant(w13.amax(1))
            layer.w2_input_multiplier = _constant(w2)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *shared: object,
        **rest: object,
    ) -> Tensor:
        """The sum of the routed experts. vLLM's runner has computed the shared experts (vllm 0.32
        moe_runner.py:617).
        """
        return nvfp4_moe(
            x,
            topk_weights,
            local_ids(layer, topk_ids),
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


def _constant(value: Tensor) -> Parameter:
    return Parameter(value.detach().clone(), requires_grad=False)


@reported_as(CPU_EXPERTS[0])
class CpuModelOptNvFp4MoE(_CpuExperts, ModelOptExperts):
    """Experts of ModelOpt checkpoints on the CPU."""


@reported_as(CPU_EXPERTS[1])
class CpuCompressedTensorsNvFp4MoE(_CpuExperts, CompressedTensorsExperts):
    """Experts of compressed-tensors checkpoints on the CPU."""
