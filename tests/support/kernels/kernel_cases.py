"""Calling one operator's implementations alike, the vectors, and comparison bit for bit."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.paths import VECTORS


def vectors(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text())


def call(implementation: str, module: str, function: str, *args: Any) -> Any:
    """The function of nibble_kernels.<module>'s reference, or its operator on a device; results
    on the CPU.
    """
    if implementation == "reference":
        return getattr(importlib.import_module(f"nibble_kernels.{module}.reference"), function)(
            *args
        )
    importlib.import_module(f"nibble_kernels.{module}")
    on_device = (arg.to(implementation) if isinstance(arg, Tensor) else arg for arg in args)
    result = getattr(torch.ops.nibble, function)(*on_device)
    return result.cpu() if isinstance(result, Tensor) else tuple(one.cpu() for one in result)


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor, by element."""
    return x.contiguous().view(-1).view(torch.uint8).view(x.numel(), x.element_size())


def assert_same_bits(
    found: tuple[Tensor, ...], expected: tuple[Tensor, ...], case: object = ""
) -> None:
    """Equal shapes, types and bytes; the message has the case, the first difference and how many
    there are.
    """
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), case
        different = (raw(one) != raw(other)).any(1).nonzero()
        assert not len(different), (
            f"{case} output {number}: {len(different)} of {one.numel()} differ, first at"
            f" {different[0].item()}: {raw(one)[different[0]].tolist()} instead of"
            f" {raw(other)[different[0]].tolist()}"
        )


def assert_residual_comes_before_rounding(
    product: Callable[[Tensor | None], Tensor], case: object = ""
) -> None:
    """product(residual): with the negated result as residual, what rounding took from each sum is
    left. So the sums are known to 16 bits, and another residual's result is their sum, rounded.
    """
    alone = product(None)
    rest = product(-alone)
    assert rest.any(), case
    assert (rest.double().abs() <= alone.double().abs() * 2.0**-8).all(), case
    residual = torch.randn(alone.shape).to(alone)
    exact = alone.double() + rest.double() + residual.double()
    bound = exact.abs() * 2.0**-8 + alone.double().abs() * 2.0**-16
    assert ((product(residual).double() - exact).abs() <= bound).all(), case


def assert_as_specified(
    device: str, module: str, function: str, *args: Any, case: object = ""
) -> None:
    """The operator on a device gives the reference's bits."""
    expected = call("reference", module, function, *args)
    assert_same_bits(call(device, module, function, *args), expected, case)


def two_byte_or_any(device: str) -> tuple[torch.dtype, ...]:
    """The element types of the quantizers: the CUDA kernels take two-byte ones."""
    return (
        (torch.bfloat16, torch.float16)
        if device == "cuda"
        else (torch.bfloat16, torch.float16, torch.float32)
    )


def float_of(bits: str) -> Tensor:
    """One float32 from its bits in hexadecimal."""
    return torch.frombuffer(bytearray.fromhex(bits)[::-1], dtype=torch.float32).clone()


def bfloat16_of(text: str, shape: list[int]) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.bfloat16).view(shape)


def bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def every_half(dtype: torch.dtype) -> Tensor:
    """All 2^16 values of a two-byte type."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def activations(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of different sizes, with zeros of both signs, a block of zeros and tiny and huge
    elements.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(
        2 * torch.randn(rows, 1, generator=generator)
    )
    x.view(-1)[:: max(7, x.numel() // 50)] *= 2.0**-30
    x.view(-1)[3 :: max(11, x.numel() // 30)] = -0.0
    x[0, :16] = 0
    x[-1, -1] = 300.0
    return x.to(dtype)


def fitting_scale(x: Tensor, factor: float = 1.0) -> Tensor:
    """The reciprocal of an input_scale calibrated on x; a factor above 1 makes the largest
    elements saturate.
    """
    return (448 * 6 / x.float().abs().max() * factor).reshape(1)


def packed_weight(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random codes, and scales of every finite byte of both signs."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 254, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    scales += scales >= 127  # not 0x7F, and not 0xFF
    return codes, scales.view(torch.float8_e4m3fn)


def values_of(weight: Tensor, scales: Tensor) -> Tensor:
    """The weight in float64, without the package's code."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat((table, -table))
    values = torch.stack((table[(weight & 15).int()], table[(weight >> 4).int()]), -1).flatten(-2)
    return values * scales.double().repeat_interleave(16, -1)


def assert_rounded_once(
    found: Tensor, x: Tensor, w: Tensor, factor: Tensor, bias: Tensor | float = 0.0
) -> None:
    """Within the rounding of float32 sums and of one conversion of the float64 product. Each column
    adds up to half a unit of the sum so far, of either sign: four times what that gives on average
    if the first block is nearly all of the sum, and at least 16 units of the sum of magnitudes.
    """
    exact = x.double() @ w.T * factor + bias
    size = x.double().abs() @ w.T.abs() * factor.abs() + abs(bias)
    kind = torch.finfo(found.dtype)
    units = max(16.0, 4 * (x.shape[-1] / 3) ** 0.5)
    bound = size * units * 2.0**-24 + exact.abs() * kind.eps / 2 + kind.smallest_normal
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()


def in_order(x: Tensor, tile: int) -> Tensor:
    """x [whole tiles of tokens, whole chunks of 128 columns] in the order in which the warpgroup
    kernel multiplies (nvfp4_linear/warpgroup_form.h).
    """
    quarters = x.view(len(x) // tile, tile, -1, 4, 4, 4, 2)  # tiles, tokens, chunks, quarters, p, i
    return quarters.permute(0, 2, 4, 5, 1, 3, 6).contiguous()
