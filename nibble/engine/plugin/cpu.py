"""nibble's NVFP4 kernels on vLLM's CPU platform, for which vLLM 0.32 has none
(kernels/linear/__init__.py:574, fused_moe/oracle/nvfp4.py).
"""

from __future__ import annotations

from typing import Any

from nibble_kernels.nvfp4_linear.packed import PackedWeight, nvfp4_packed_linear, pack_weight
from nibble_kernels.nvfp4_moe import activation_of
from nibble_kernels.nvfp4_moe.packed import nvfp4_packed_moe, pack_experts
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
    """nibble::nvfp4_packed_linear on a weight that is packed once, when it is loaded.

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

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace codes and scales by packed ones. Raises ValueError if a scale is NaN."""
        packed = pack_weight(layer.weight.data, layer.weight_scale.data)
        layer.weight, layer.weight_scale = _constant(packed.codes), _constant(packed.scales)
        self.rows = packed.rows

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nvfp4_packed_linear(
            x,
            PackedWeight(layer.weight, layer.weight_scale, self.rows),
            layer.weight_global_scale,
            column_scale=getattr(layer, "weight_column_scale", None),
            bias=bias,
            input_scale_inv=getattr(layer, "input_global_scale_inv", None),
        )


class _CpuExperts(Experts):
    """nibble::nvfp4_packed_moe on experts that are packed once, when they are loaded."""

    where = "on the CPU"

    def prepare(
        self, layer: Any, global_scales: tuple[Tensor, Tensor], input_scales: tuple[Tensor, Tensor]
    ) -> None:
        """Store the multipliers. gate and up share an input, so the larger scale counts."""
        self.swiglu = {name: swiglu(layer, self.moe, name) for name in ("limit", "alpha", "beta")}
        activation_of(layer.activation.value, **self.swiglu)
        layer.w13_global_scale, layer.w2_global_scale = (
            _constant(scale.detach().clone()) for scale in global_scales
        )
        for name in ("w13", "w2"):
            codes, scales = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            packed = pack_experts(codes.data, scales.data)
            for part, tensor in zip(("weight", "weight_scale"), packed, strict=True):
                setattr(layer, f"{name}_{part}", _constant(tensor))
        if not self.use_a16:
            w13, w2 = input_scales
            layer.w13_input_multiplier = _constant(w13.amax(1))
            layer.w2_input_multiplier = _constant(w2.detach().clone())

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
        return nvfp4_packed_moe(
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
    return Parameter(value.detach(), requires_grad=False)


@reported_as(CPU_EXPERTS[0])
class CpuModelOptNvFp4MoE(_CpuExperts, ModelOptExperts):
    """Experts of ModelOpt checkpoints on the CPU."""


@reported_as(CPU_EXPERTS[1])
class CpuCompressedTensorsNvFp4MoE(_CpuExperts, CompressedTensorsExperts):
    """Experts of compressed-tensors checkpoints on the CPU."""
