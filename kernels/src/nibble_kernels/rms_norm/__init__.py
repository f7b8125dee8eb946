"""nibble::rms_norm: RMSNorm whose successor may begin while it runs, on NVIDIA GPUs."""

from __future__ import annotations

from torch import Tensor

from nibble_kernels.library import operator

__all__ = ["MAX_COLUMNS", "rms_norm"]

MAX_COLUMNS = 32768  # on a GPU: kernel.cu


def _reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The specification: vLLM's definition (vllm 0.32 ir/ops/layernorm.py:10)."""
    values = x.float()
    values = values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return values.to(x.dtype) * weight


_operator = operator(
    "rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor",
    _reference,
    lambda x, weight, epsilon: x.new_empty(x.shape),
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., K], bfloat16 or float16, divided by the root of its row's mean square plus epsilon,
    rounded to x's dtype, then times weight [K] of the same dtype. K must be a multiple of 8,
    at most MAX_COLUMNS.
    """
    return _operator(x, weight, epsilon)
