"""Functions on the tensors of a layer, independent of vLLM's classes.

A layer is any module whose tensors have vLLM's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nibble_kernels.merge import (
    ScaleError,
    lift_experts_for_marlin,
    merge_gate_up,
    merge_scales,
)
from torch import Tensor
from torch.nn import Parameter

from nibble.engine.contract import NOT_LOADED

COLUMN_SCALE = "weight_column_scale"  # float32 [N], only on layers that need it


def mark_unloaded(layer: Any, *names: str) -> None:
    """Fill scales with NaN, so that `check_loaded` finds those that no file has.

    vLLM does not initialize their memory.
    """
    for name in names:
        if hasattr(layer, name):
            getattr(layer, name).data.fill_(float("nan"))


def check_loaded(layer: Any, *names: str) -> None:
    """Raise ScaleError with the layer's name for scales that no file has or that are NaN."""
    for name in names:
        if getattr(layer, name).data.float().isnan().any():
            action = "`nibble inspect` shows what the checkpoint has"
            if "input" in name:
                action = (
                    "NIBBLE_NVFP4_ACTIVATIONS=bf16 serves a model without scales for its"
                    " activations"
                )
            raise ScaleError(
                f"{name_of(layer)}.{name} {NOT_LOADED}, or is NaN; expected a value for each of"
                f" the layer's tensors; {action}"
            )


def name_of(layer: Any) -> str:
    """The layer's name in the model, or its class if vLLM does not store the name."""
    return getattr(layer, "prefix", "") or getattr(layer, "layer_name", "") or type(layer).__name__


def kernel_of(module: Any) -> Any:
    """The kernel object of a linear layer, or None.

    The quantization method has it, or the scheme of compressed-tensors.
    """
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    return getattr(method, "kernel", None) or getattr(scheme, "kernel", None)


def merge_layer(layer: Any, name: str, marlin: bool, divisors: bool = False) -> Tensor | None:
    """Give a fused layer one global scale and new block scales, in place (merge.merge_scales).

    name: of the global scales [parts]; divisors: they are divisors; marlin: Marlin multiplies.
    Returns factors of the output columns, float32 [N], or None. Raises ScaleError.
    """
    stored = getattr(layer, name).data
    multipliers = 1 / stored if divisors else stored
    scales = layer.weight_scale.data
    codes = _codes(layer, "weight", divisors) if marlin else None
    try:
        merged = merge_scales(scales, multipliers, layer.logical_widths, codes)
    except ScaleError as error:
        raise ScaleError(f"{name_of(layer)}.{name}: {error}") from None
    # A stored value, so that a divisor is not inverted twice.
    stored.fill_(stored[int((multipliers == merged.global_scale).nonzero()[0])].item())
    if merged.scales is not scales:
        scales.copy_(merged.scales)
    return merged.column_scale


def _codes(layer: Any, weight: str, divisors: bool) -> Tensor:
    """The codes of a weight. compressed-tensors, whose global scales are divisors, renames them
    only later.
    """
    return getattr(layer, f"{weight}_packed" if divisors else weight).data


def set_column_scale(layer: Any, column_scale: Tensor | None) -> None:
    """Store the column factors in the layer. Call it after the kernel's preparation, because
    Humming's removes parameters that it does not know.
    """
    if column_scale is not None:
        layer.register_parameter(COLUMN_SCALE, Parameter(column_scale, requires_grad=False))


def apply_column_scale(
    layer: Any,
    kernel: object,
    apply: Callable[..., Tensor],
    x: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The result of `apply` with the column factors, which come before the bias.

    A kernel with `fuses_column_scale` applies them itself.
    """
    column_scale = getattr(layer, COLUMN_SCALE, None)
    if column_scale is None or getattr(kernel, "fuses_column_scale", False):
        return apply(layer, x, bias)
    out = apply(layer, x, None)
    scaled = out * column_scale
    return (scaled if bias is None else scaled + bias).to(out.dtype)


def merge_experts(
    layer: Any,
    global_name: str,
    input_name: str | None,
    *,
    gated: bool,
    linear_in_up: bool,
    marlin: bool,
    divisors: bool,
) -> None:
    """Merge w13's two global scales of each expert, in place (merge.merge_gate_up), and shift block
    scales for Marlin. Raises ScaleError.

    global_name: `layer.w13_<global_name>` is [E, 2] or [E, 1], `layer.w2_<global_name>` is [E].
    input_name: `layer.w2_<input_name>` is [E], or [experts of all ranks] for kernels that use the
    largest scale of all experts; None for weight-only kernels.
    linear_in_up: the activation is linear in up; divisors: global scales are divisors.
    """
    try:
        if gated:
            _merge_gate_up(layer, global_name, input_name, linear_in_up, divisors)
        if marlin:
            for weight in ("w13", "w2"):
                _lift(layer, weight, f"{weight}_{global_name}", divisors)
    except ScaleError as error:
        raise ScaleError(f"{name_of(layer)}: {error}") from None


def _merge_gate_up(
    layer: Any, global_name: str, input_name: str | None, linear_in_up: bool, divisors: bool
) -> None:
    w13, w2 = (getattr(layer, f"{weight}_{global_name}").data for weight in ("w13", "w2"))
    if (w13[:, 0] == w13[:, 1]).all():
        return  # already equal, and divisors are not inverted twice
    w2_input = getattr(layer, f"w2_{input_name}").data if input_name else None
    local = _local_experts(layer, w2_input) if w2_input is not None else None

    def inverted(scale: Tensor) -> Tensor:
        """A divisor as a multiplier, or the reverse."""
        return 1 / scale if divisors else scale

    merged = merge_gate_up(
        layer.w13_weight_scale.data,
        inverted(w13),
        inverted(w2),
        inverted(w2_input[local]) if w2_input is not None else None,
        linear_in_up,
    )
    layer.w13_weight_scale.data.copy_(merged.w13_scales)
    w13.copy_(inverted(merged.w13_global_scale)[:, None].expand_as(w13))
    w2.copy_(inverted(merged.w2_global_scale))
    if w2_input is not None and merged.w2_input_scale is not None:
        w2_input[local] = inverted(merged.w2_input_scale)


def _lift(layer: Any, weight: str, global_name: str, divisors: bool) -> None:
    blocks, stored = getattr(layer, f"{weight}_weight_scale").data, getattr(layer, global_name).data
    first = stored.reshape(len(stored), -1)[:, 0]  # w13's columns are equal after _merge_gate_up
    before = 1 / first if divisors else first
    lifted, multipliers = lift_experts_for_marlin(
        blocks, before, _codes(layer, f"{weight}_weight", divisors)
    )
    if lifted is not blocks:
        blocks.copy_(lifted)
    if multipliers is not before:
        values = 1 / multipliers if divisors else multipliers
        stored.copy_(values.reshape(-1, *[1] * (stored.ndim - 1)).expand_as(stored))


def _local_experts(layer: Any, w2_input: Tensor) -> Tensor:
    """Indices of this rank's experts in `w2_input`."""
    count = layer.w13_weight_scale.shape[0]
    if w2_input.shape[0] == count:
        return torch.arange(count, device=w2_input.device)
    return (layer.expert_map >= 0).nonzero().flatten()
