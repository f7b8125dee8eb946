"""nibble's GPU kernels for NVFP4 weights and NVFP4 activations, as vLLM linear layers and experts.

For GPUs with nibble's FP4 products: SM12x. Layers quantize their input at any number of rows, so
that a token gets the same format of activations alone and in a prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.nvfp4_linear.w4a4 import COLUMN_MULTIPLE, nvfp4_w4a4_weight_linear
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight
from nibble_kernels.nvfp4_moe import Activation, activation_of
from nibble_kernels.nvfp4_moe.grouped import FUNCTIONS, MAX_EXPERTS
from nibble_kernels.nvfp4_moe.w4a4 import nvfp4_w4a4_moe
from torch import Tensor
from torch.nn import Parameter
from vllm import envs
from vllm.platforms import current_platform

from nibble.engine.contract import FP4_PRODUCTS, GPU_W4A4_EXPERTS, GPU_W4A4_LINEAR, reported_as
from nibble.engine.plugin.cuda import WEIGHTS, GpuExperts, NibbleNvFp4LinearKernel
from nibble.engine.plugin.experts import (
    CompressedTensorsExperts,
    ModelOptExperts,
    local_ids,
    swiglu,
)
from nibble.engine.plugin.layers import name_of
from nibble.engine.plugin.options import current_options, weights_are_real

BF16_ACTIVATIONS = "set nvfp4_activations to bf16"


def multiplies_fp4() -> bool:
    """Whether nibble's kernels multiply FP4 activations on this GPU. Others emulate that."""
    if not current_platform.is_cuda():
        return False
    capability = current_platform.get_device_capability()
    return capability is not None and capability[0] == FP4_PRODUCTS


def check_linear_options() -> None:
    """Raise ValueError for an option that the linear kernel for FP4 activations rules out."""
    if envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            "VLLM_BATCH_INVARIANT rules out nibble's NVFP4 kernel for FP4 activations: the order of"
            f" its sums depends on the number of rows; {BF16_ACTIVATIONS}"
        )
    if current_options().sparse_fp4 == "on":
        raise ValueError(
            "sparse_fp4 leaves activations in BF16, and the checkpoint has them in FP4;"
            f" {BF16_ACTIVATIONS}"
        )


@reported_as(GPU_W4A4_LINEAR)
class NibbleNvFp4W4A4LinearKernel(NibbleNvFp4LinearKernel):
    """nibble::nvfp4_w4a4_weight_linear. The weight is rearranged once, when it is loaded.

    The scale of the input and its product with the weight's are vLLM's: the largest of a fused
    layer's (compressed-tensors: of its divisors). Applies `weight_column_scale`, float32 [N], if
    the layer has it.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace codes and scales by those of prepare_weight. Raises ValueError for a layer that
        the kernel does not support.
        """
        dtype = getattr(layer, "params_dtype", torch.get_default_dtype())
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name_of(layer)} in {dtype} is not supported by nibble's NVFP4 kernel for FP4"
                " activations; expected bfloat16 or float16"
            )
        codes = layer.weight.data
        if (columns := 2 * codes.shape[1]) % COLUMN_MULTIPLE:
            raise ValueError(
                f"{name_of(layer)} has {columns} columns; nibble's NVFP4 kernel for FP4 activations"
                f" expects a multiple of {COLUMN_MULTIPLE}; {BF16_ACTIVATIONS}"
            )
        _check_input_scale(layer, "an input scale", layer.input_global_scale_inv)
        prepared = prepare_weight(codes, layer.weight_scale.data, native=True)
        layer.weight = Parameter(prepared.codes, requires_grad=False)
        layer.weight_scale = Parameter(prepared.scales, requires_grad=False)
        self.rows, self.native = prepared.rows, prepared.native
        self.global_scale = float(layer.alpha)  # of both operands

    def apply_weights(
        self,
        layer: Any,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        silu_mul: bool = False,
    ) -> Tensor:
        """x [..., K] to [..., N], or to [..., N/2] with silu_mul, plus a residual of that shape."""
        return nvfp4_w4a4_weight_linear(
            x,
            layer.input_global_scale_inv,
            PreparedWeight(layer.weight, layer.weight_scale, self.rows, self.native),
            self.global_scale,
            column_scale=getattr(layer, "weight_column_scale", None),
            bias=bias,
            residual=residual,
            silu_mul=silu_mul,
        )

    def after_norm(self, layer: Any) -> None:
        """The operators with a norm leave activations unquantized."""


class _W4A4Experts(GpuExperts):
    """nibble::nvfp4_w4a4_moe. Each expert keeps its own input scales; gate and up share the larger
    one, as vLLM's kernels with a scale for each expert do.
    """

    where = "by nibble's GPU kernel for FP4 activations"
    in_fp4 = True

    def prepare(
        self, layer: Any, global_scales: tuple[Tensor, Tensor], input_scales: tuple[Tensor, Tensor]
    ) -> None:
        """Replace codes and scales by those of prepare_experts, and keep the input scales. Raises
        ValueError for experts that the kernel does not support.
        """
        super().prepare(layer, global_scales, input_scales)
        for name, scales in zip(WEIGHTS, input_scales, strict=True):
            each = scales.data.float().reshape(len(scales), -1).amax(1)
            _check_input_scale(layer, f"an input scale of {name}", each)
            parameter = Parameter(each.contiguous(), requires_grad=False)
            setattr(layer, f"{name}_input_multiplier", parameter)

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
        return nvfp4_w4a4_moe(
            x,
            topk_weights,
            local_ids(layer, topk_ids),
            self._experts(layer, "w13"),
            self._experts(layer, "w2"),
            layer.w13_input_multiplier,
            layer.w2_input_multiplier,
            w13_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            **self.formula,
        )

    def _activation(self, layer: Any) -> Activation:
        """Raises ValueError for one that the kernel does not compute."""
        limits = [swiglu(layer, self.moe, name) for name in ("limit", "alpha", "beta")]
        found = activation_of(layer.activation.value, *limits)
        experts = len(layer.w13_weight)
        if experts > MAX_EXPERTS:
            raise ValueError(
                f"{experts} experts are not supported {self.where}; expected at most {MAX_EXPERTS}"
            )
        if layer.apply_router_weight_on_input or found.function not in FUNCTIONS:
            raise ValueError(
                f"experts with {layer.activation.value} are not supported {self.where}; expected"
                f" {' or '.join(FUNCTIONS)}, with the router's weights on the output"
            )
        return found


def _check_input_scale(layer: Any, what: str, scales: Tensor) -> None:
    """Raise ValueError for a scale that is not a positive number. With --load-format dummy vLLM
    fills them with random numbers of both signs.
    """
    if weights_are_real() and not (scales.isfinite() & (scales > 0)).all():
        raise ValueError(
            f"{name_of(layer)} has {what} that is not a positive number; {BF16_ACTIVATIONS} to"
            " serve the model without"
        )


@reported_as(GPU_W4A4_EXPERTS[0])
class NibbleModelOptW4A4MoE(_W4A4Experts, ModelOptExperts):
    """Experts of ModelOpt checkpoints in nibble's GPU kernel, with FP4 activations."""


@reported_as(GPU_W4A4_EXPERTS[1])
class NibbleCompressedTensorsW4A4MoE(_W4A4Experts, CompressedTensorsExperts):
    """Experts of compressed-tensors checkpoints in nibble's GPU kernel, with FP4 activations."""
