"""fp8_linear: the operator against float64, and its kernel's own source on the host
(tests/kernels/emulator), where PTX's description stands in for the instruction.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import assert_rounded_once, assert_same_bits

SHAPES = [(1, 32, 144), (8, 40, 2064), (13, 136, 1152), (30, 24, 400)]  # tokens, N, K
KINDS = ["tensor", "token and channel", "blocks"]


def eighths(rows: int, columns: int, seed: int) -> Tensor:
    """Every finite E4M3 byte, as often as any."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 254, (rows, columns), dtype=torch.uint8, generator=generator)
    return (codes + (codes >= 127)).view(torch.float8_e4m3fn)


def scales_of(kind: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    tokens, outputs, columns = shape
    generator = torch.Generator().manual_seed(1)
    if kind == "blocks":
        sizes = (tokens, -(-columns // 128)), (-(-outputs // 128), -(-columns // 128))
    elif kind == "tensor":
        sizes = (1,), (1,)
    else:
        sizes = (tokens,), (outputs,)
    x, weight = ((torch.rand(size, generator=generator) + 0.5) * 2.0**-9 for size in sizes)
    return x, weight


def scaled(values: Tensor, scale: Tensor, kind: str, rows: int) -> Tensor:
    """In float64, with the scales of blocks of `rows` by 128."""
    if kind != "blocks":
        return values.double() * scale.double().reshape(-1, 1)
    by_row = scale.double().repeat_interleave(rows, 0)[: len(values)]
    return values.double() * by_row.repeat_interleave(128, 1)[:, : values.shape[1]]


def check(y: Tensor, x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], kind: str) -> None:
    left, right = scaled(x, scales[0], kind, 1), scaled(weight, scales[1], kind, 128)
    assert_rounded_once(y, left, right, torch.ones(()).double(), torch.ones(()).double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 40, 144)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_are_rounded_once(
    kernels: ModuleType, shape: tuple[int, int, int], kind: str, device: str
) -> None:
    from nibble_kernels.fp8_linear import fp8_linear

    tokens, outputs, columns = shape
    x, weight, scales = (
        eighths(tokens, columns, 0),
        eighths(outputs, columns, 1),
        scales_of(kind, shape),
    )
    for dtype in (torch.bfloat16, torch.float16):
        bias = torch.ones(outputs, dtype=dtype)
        left, right, x_scale, scale = (one.to(device) for one in (x, weight, *scales))
        options: dict[str, Any] = {"bias": bias.to(device), "blockwise": kind == "blocks"}
        y = fp8_linear(left, right, x_scale, scale, dtype, **options)
        check(y.cpu(), x, weight, scales, kind)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("fp8_linear.cpp", tmp_path_factory.mktemp("emulator"))


def on_the_host(
    library: ctypes.CDLL, x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], kind: str
) -> Tensor:
    bias = torch.ones(len(weight)).bfloat16()
    out = torch.full((len(x), len(weight)), float("nan")).bfloat16()
    library.multiply_fp8_on_the_host(
        True,
        kind == "blocks",
        *pointers(x, weight, *scales, bias, out),
        len(x),
        *weight.shape,
        scales[0].numel() == 1,
        scales[1].numel() == 1,
    )
    return out


@needs_compiler
@pytest.mark.when_changed(*OPERATORS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_source_gives_the_sum(library: ctypes.CDLL, kind: str) -> None:
    for shape in SHAPES:
        tokens, outputs, columns = shape
        x, weight = eighths(tokens, columns, 0), eighths(outputs, columns, 1)
        scales = scales_of(kind, shape)
        check(on_the_host(library, x, weight, scales, kind), x, weight, scales, kind)


@needs_compiler
@pytest.mark.when_changed(*OPERATORS)
def test_a_row_does_not_depend_on_the_others(library: ctypes.CDLL) -> None:
    x, weight = eighths(32, 1040, 0), eighths(40, 1040, 1)
    scales = scales_of("tensor", (32, 40, 1040))
    expected = on_the_host(library, x, weight, scales, "tensor")
    for first, count in ((0, 1), (3, 9)):
        some = x[first : first + count].contiguous()
        found = on_the_host(library, some, weight, scales, "tensor")
        assert_same_bits((found,), (expected[first : first + count],))


def test_what_it_does_not_take_is_named(kernels: ModuleType) -> None:
    from nibble_kernels.fp8_linear import fp8_linear

    x, weight, one = eighths(1, 24, 0), eighths(8, 24, 1), torch.ones(1)
    with pytest.raises(ValueError, match="each row of the weight; got 3 and 1"):
        fp8_linear(eighths(2, 32, 0), eighths(8, 32, 1), one.expand(3), one, torch.bfloat16)
    with pytest.raises(ValueError, match="each 128 by 128 of the weight; got 2 and 1"):
        fp8_linear(
            eighths(1, 256, 0),
            eighths(8, 256, 1),
            one.expand(2),
            one,
            torch.bfloat16,
            blockwise=True,
        )
    with pytest.raises(ValueError, match="multiple of 16 columns; got 24"):
        fp8_linear(x, weight, one, one, torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected float8_e4m3fn; got torch\.float32"):
        fp8_linear(x.float(), weight, one, one, torch.bfloat16)
