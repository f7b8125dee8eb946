"""NVFP4 on vLLM's CPU platform, for which vLLM 0.32 has no kernel: its table of them ends at CUDA and ROCm."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.platforms import current_platform

from nibble_kernels.nvfp4_linear import nvfp4_linear


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

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nvfp4_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            column_scale=getattr(layer, "weight_column_scale", None),
            bias=bias,
            input_scale_inv=getattr(layer, "input_global_scale_inv", None),
        )
