"""nibble::rms_norm and add_rms_norm: RMSNorm whose successor may begin while it runs, on NVIDIA
GPUs.
"""

from __future__ import annotations

from torch import Tensor

from nibble_kernels.library import operator

__all__ = ["MAX_COLUMNS", "add_rms_norm", "rms_norm"]

MAX_COLUMNS = 32768  # on a GPU: kernel.cu


def _normal(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """vLLM's definition (vllm 0.32 ir/ops/layernorm.py:10)."""
    normal = values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return normal.to(weight.dtype) * weight


def _added(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return _normal(total, weight, epsilon), total.to(x.dtype)


_norm = operator(
    "rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor",
    lambda x, weight, epsilon: _normal(x.float(), weight, epsilon),
    lambda x, weight, epsilon: x.new_empty(x.shape),
)
_add_norm = operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    _added,
    lambda x, residual, weight, epsilon: (x.new_empty(x.shape), x.new_empty(x.shape)),
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., K], bfloat16 or float16, divided by the root of its row's mean square plus epsilon,
    rounded to x's dtype, then times weight [K] of the same dtype. K must be a multiple of 8,
    at most MAX_COLUMNS.
    """
    return _norm(x, weight, epsilon)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """rms_norm of x + residual, both [..., K], and the sum. The norm is that of the sum before it
    is rounded to x's dtype.
    """
    return _add_norm(x, residual, weight, epsilon)
