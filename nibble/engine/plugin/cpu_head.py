"""The output head in BF16 on vLLM's CPU platform: read as it is stored.

vLLM 0.32 makes a second copy of every embedding and head, in oneDNN's order
(layers/utils.py:dispatch_cpu_unquantized_gemm).
"""

from __future__ import annotations

from typing import Any

import nibble_kernels
import torch
from nibble_kernels.bf16_linear import bf16_linear
from torch import Tensor
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from nibble.engine.plugin.require import replace, required

FEW_ROWS = 32  # with more, torch's product is faster


def read_heads_as_stored() -> None:
    """Replace dispatch_cpu_unquantized_gemm for embeddings and heads. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    name = "dispatch_cpu_unquantized_gemm"
    dispatch = required(utils, name, "layer", "remove_weight")

    def dispatch_others(layer: Any, remove_weight: bool) -> None:
        if _is_embedding(layer) and is_ours(layer.weight):
            layer.cpu_linear = head_product
        else:
            dispatch(layer, remove_weight)

    if nibble_kernels.implementations()["cpu"] == "compiled":
        replace(utils, name, dispatch_others)


def _is_embedding(layer: object) -> bool:
    return isinstance(layer, VocabParallelEmbedding)  # of which heads are a kind


def is_ours(weight: Tensor) -> bool:
    """Whether bf16_linear reads it."""
    return weight.dtype == torch.bfloat16 and weight.ndim == 2 and weight.is_contiguous()


def head_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x times the transposed weight, plus the bias."""
    rows = x.numel() // x.shape[-1]
    if bias is None and rows <= FEW_ROWS and x.dtype == torch.bfloat16:
        return bf16_linear(x, weight)
    return torch.nn.functional.linear(x, weight, bias)
