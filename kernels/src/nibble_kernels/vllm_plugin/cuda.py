"""NVFP4 weights with unquantized activations on NVIDIA GPUs: nibble's decode GEMM as a vLLM kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm import envs
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.platforms import current_platform

from nibble_kernels.library import load
from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight, wants_native


class NibbleNvFp4LinearKernel(NvFp4LinearKernel):
    """nibble::nvfp4_weight_linear on a weight that is put in the order of its use once, when it is loaded.

    W4A16, also for a layer whose checkpoint has input scales, as vLLM's Marlin and Humming do it. `weight_column_scale`,
    float32 [N], is applied where the layer has it. With VLLM_BATCH_INVARIANT=1 a row's result does not depend on how many there
    are.
    """

    fuses_column_scale = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cuda() or not current_platform.has_device_capability(90):
            return False, "it needs an NVIDIA GPU of compute capability 9.0 or later"
        found = load().get("cuda", "not compiled")
        return found == "compiled", f"nibble-kernels: CUDA {found}"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace codes and scales by those of prepare_weight. Raises ValueError for rows in no multiple of 8."""
        codes = layer.weight.data
        dtype = getattr(layer, "params_dtype", torch.get_default_dtype())
        prepared = prepare_weight(codes, layer.weight_scale.data, wants_native(dtype, codes.device))
        layer.weight = Parameter(prepared.codes, requires_grad=False)
        layer.weight_scale = Parameter(prepared.scales, requires_grad=False)
        self.rows, self.native = prepared.rows, prepared.native
        self.global_scale = float(layer.weight_global_scale)

    def apply_weights(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, *, silu_mul: bool = False
    ) -> Tensor:
        """x [..., K] -> [..., N], or [..., N/2] with silu_mul; a layer's `next_weight` is looked at meanwhile."""
        return nvfp4_weight_linear(
            x,
            PreparedWeight(layer.weight, layer.weight_scale, self.rows, self.native),
            self.global_scale,
            column_scale=getattr(layer, "weight_column_scale", None),
            bias=bias,
            silu_mul=silu_mul,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            next_codes=getattr(layer, "next_weight", None),
            next_bytes=getattr(layer, "next_weight_bytes", 0),
        )
