"""Kernel of a trial -> products with a weight. The names are those of catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nibble.trials.trial import shape_name
from nibble.trials.worker.planted import Product
from nibble.trials.worker.truth import Weight, two_of_four

INPUT_SCALE = 4.5 / 2688  # 4.5: the largest of some ten thousand normal numbers
SPARSE = "sparse"


class Refused(Exception):
    """The kernel is not for this machine; the text says why."""


@dataclass(frozen=True)
class Prepared:
    """A weight in the kernel's layout.

    `form`: the format of activations, bf16 or fp4; `ran`: class or instructions that compute;
    `again`: the same product with copies of the weight's tensors; `least_rows`, `most_rows`: of x.
    `with_factors` adds factors for the columns and a bias, `with_silu` computes silu(gate) · up:
    only nibble's kernels do that in one, in the same form.
    """

    product: Product
    form: str = "bf16"
    ran: str = ""
    again: Callable[[], Product] | None = None
    with_factors: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    with_silu: Product | None = None
    least_rows: int = 1
    most_rows: int | None = None


def prepare(kernel: str, weight: Weight) -> Prepared:
    """Raises Refused, and what the kernel raises for a weight that it does not take."""
    kind, _, rest = kernel.partition(":")
    if kind == "cpu":
        return _cpu(rest, weight)
    if kind == "vllm":
        from nibble.trials.worker.vllm_layers import vllm_layer

        backend, _, form = rest.partition(":")
        return vllm_layer(backend, form or "bf16", weight)
    require_compiled(weight.codes.device.type)
    return _OURS[kernel](weight)


def fitting(kernel: str, weight: Weight) -> Weight:
    """The weight, or one that the kernel for 2:4 sparse weights takes."""
    return two_of_four(weight) if kernel == SPARSE else weight


def _prepared(weight: Weight) -> Any:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight, wants_native

    native = wants_native(torch.bfloat16, weight.codes.device)
    return prepare_weight(weight.codes, weight.scales, native)


def require_compiled(device: str) -> None:
    """Raises Refused. On the CPU an operator for GPUs is its specification."""
    from nibble_kernels import implementations

    if device.startswith("cuda") and (state := implementations().get("cuda", "")) != "compiled":
        raise Refused(f"nibble-kernels: CUDA kernels are {state or 'not compiled'}")


def _decode(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_linear.gpu import MAX_DECODE_ROWS, nvfp4_decode_linear

    fused = _fused(weight, nvfp4_decode_linear, _prepared(weight))
    return replace(fused, most_rows=MAX_DECODE_ROWS)


def _warpgroup(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_linear.gpu import (
        MAX_DECODE_ROWS_SM90,
        MAX_WARPGROUP_ROWS,
        nvfp4_warpgroup_linear,
    )

    if weight.codes.is_cuda and torch.cuda.get_device_capability() != (9, 0):
        raise Refused("it is compiled for compute capability 9.0 alone")
    prepared = _fused(weight, nvfp4_warpgroup_linear, _prepared(weight))
    return replace(prepared, least_rows=MAX_DECODE_ROWS_SM90 + 1, most_rows=MAX_WARPGROUP_ROWS)


def _w4a4(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_linear.w4a4 import nvfp4_w4a4_linear

    return _in_fp4(weight, nvfp4_w4a4_linear)


def _whole_in_fp4(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_linear.w4a4 import nvfp4_w4a4_weight_linear

    return _in_fp4(weight, nvfp4_w4a4_weight_linear)


def _in_fp4(weight: Weight, operator: Callable[..., Tensor]) -> Prepared:
    """An operator with factors, bias and silu · mul that quantizes x. Raises Refused."""
    from nibble_kernels.nvfp4_linear.w4a4 import COLUMN_MULTIPLE
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    if weight.shape[1] % COLUMN_MULTIPLE:
        raise Refused(f"{shape_name(weight.shape)} has no columns in {COLUMN_MULTIPLE}s")
    inverse = torch.tensor([1 / INPUT_SCALE], device=weight.codes.device)
    tensors = prepare_weight(weight.codes, weight.scales, native=True)

    def product(x: Tensor, used: Any, scale: float, **options: Any) -> Tensor:
        return operator(x, inverse, used, scale, **options)

    scaled = replace(weight, global_scale=weight.global_scale * INPUT_SCALE)
    return replace(_fused(scaled, product, tensors), form="fp4")


def _sparse(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_sparse import nvfp4_sparse_weight_linear, pack_sparse

    packed = pack_sparse(weight.codes, weight.scales, native=False)
    return _fused(weight, nvfp4_sparse_weight_linear, packed)


def _dequantized(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_dequantize_weight

    columns = weight.shape[1]

    def product(tensors: Any) -> Product:
        return lambda x: (x @ nvfp4_dequantize_weight(tensors, columns, x).T) * weight.global_scale

    return _of(_prepared(weight), product)


def _whole(weight: Weight) -> Prepared:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear

    return _fused(weight, nvfp4_weight_linear, _prepared(weight))


def _fused(weight: Weight, operator: Callable[..., Tensor], tensors: Any) -> Prepared:
    """An operator with factors, bias and silu · mul."""
    scale = weight.global_scale

    def with_factors(x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
        return operator(x, tensors, scale, column_scale=factors, bias=bias)

    return replace(
        _of(tensors, lambda used: lambda x: operator(x, used, scale)),
        with_factors=with_factors,
        with_silu=lambda x: operator(x, tensors, scale, silu_mul=True),
    )


def _of(tensors: Any, product: Callable[[Any], Product]) -> Prepared:
    def again() -> Product:
        parts = (part.clone() if isinstance(part, Tensor) else part for part in tensors)
        return product(type(tensors)(*parts))

    return Prepared(product(tensors), ran="nibble", again=again)


_OURS: dict[str, Callable[[Weight], Prepared]] = {
    "decode": _decode,
    "warpgroup": _warpgroup,
    "w4a4:fp4": _w4a4,
    SPARSE: _sparse,
    "dequantized": _dequantized,
    "nibble": _whole,
    "nibble:fp4": _whole_in_fp4,
}


def _cpu(kernel: str, weight: Weight) -> Prepared:
    """`cpu:LEVEL:FORM`: nibble's product on the CPU with an instruction set."""
    from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level
    from nibble_kernels.nvfp4_linear.packed import nvfp4_packed_linear, pack_weight

    level, _, form = kernel.partition(":")
    if level not in cpu_levels():
        raise Refused(f"this processor has no {level}, or nibble-kernels was not compiled")
    use_cpu_level(level)
    packed = pack_weight(weight.codes, weight.scales)
    factor = torch.tensor(weight.global_scale, dtype=torch.float32)
    inverse = torch.tensor(1 / INPUT_SCALE, dtype=torch.float32) if form == "fp4" else None

    def product(tensors: Any) -> Product:
        return lambda x: nvfp4_packed_linear(x, tensors, factor, input_scale_inv=inverse)

    def again() -> Product:
        return product(packed._replace(codes=packed.codes.clone(), scales=packed.scales.clone()))

    return Prepared(product(packed), form or "bf16", level, again)


def stored_activations(x: Tensor, form: str, input_scale: float = INPUT_SCALE) -> Tensor | None:
    """The activations that a kernel for FP4 ones multiplies, in float64; None for BF16."""
    if form == "bf16":
        return None
    from nibble_kernels.activation_quant.reference import nvfp4_quant

    from nibble.trials.worker.truth import values

    inverse = torch.tensor(1 / input_scale, dtype=torch.float32, device=x.device)
    codes, scales = nvfp4_quant(x, inverse, tiled=False, exact=True)
    return values(codes, scales) * input_scale
