"""The 2:4 sparse weight: what its packer proves and keeps, and its kernel's own source on the host
(tests/kernels/emulator), where PTX's description stands in for the sparse product.
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
from tests.support.kernels.kernel_cases import (
    activations,
    assert_rounded_once,
    assert_same_bits,
    packed_weight,
    values_of,
)

GLOBAL_SCALE = 1.23e-4
# Rows of x, N, K: half a chunk at a row's end, fewer chunks than warps and more than a phase.
CASES = [(1, 24, 176), (8, 48, 3360), (13, 32, 1056), (16, 40, 2000)]


def sparse_weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random codes of which up to two in four stay, in every place."""
    codes, scales = packed_weight(rows, columns)
    generator = torch.Generator().manual_seed(2)
    order = torch.rand(rows, columns // 4, 4, generator=generator).argsort(-1)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).reshape(rows, columns // 4, 4)
    nibbles = nibbles.masked_fill(order >= 2, 0).reshape(rows, columns // 2, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, scales


@pytest.mark.parametrize("native", [True, False])
def test_packing_keeps_every_product(kernels: ModuleType, native: bool) -> None:
    from nibble_kernels.nvfp4_sparse import dense_weight, pack_sparse

    for rows, columns in ((8, 16), (24, 176), (40, 1056)):
        codes, scales = sparse_weight(rows, columns)
        packed = pack_sparse(codes, scales, native)
        assert torch.equal(values_of(*dense_weight(packed, columns)), values_of(codes, scales))


def test_its_bytes_are_seven_ninths(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_linear.weight import prepare_weight
    from nibble_kernels.nvfp4_sparse import pack_sparse

    weight = sparse_weight(64, 512)
    sparse, dense = pack_sparse(*weight, native=True), prepare_weight(*weight, native=True)
    assert 9 * sum(one.nbytes for one in sparse[:3]) == 7 * sum(one.nbytes for one in dense[:2])


def test_a_weight_that_is_not_sparse_is_refused_with_its_share(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_sparse import NotSparseError, pack_sparse, share_that_is_not_sparse

    codes, scales = sparse_weight(64, 400)
    assert share_that_is_not_sparse(codes) == 0
    codes[5, :2] = 0x11
    codes[7, 0] = 0x88  # negative zeros are zeros
    assert share_that_is_not_sparse(codes) == 1 / (64 * 100)
    with pytest.raises(NotSparseError, match=r"not 2:4 sparse: 0\.02% of") as found:
        pack_sparse(codes, scales, native=True)
    assert found.value.share == 1 / 6400


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(kernels: ModuleType, device: str, dtype: torch.dtype) -> None:
    from nibble_kernels.nvfp4_sparse import SparseWeight, nvfp4_sparse_linear, pack_sparse

    for tokens, rows, columns in [*CASES, (35, 40, 176)]:
        weight, x = sparse_weight(rows, columns), activations(tokens, columns, dtype)
        packed = pack_sparse(*weight, native=dtype == torch.float16)
        arrays = (one.to(device) for one in packed[:3])
        on_device = SparseWeight(*arrays, rows=packed.rows, native=packed.native)
        y = nvfp4_sparse_linear(x.to(device), on_device, GLOBAL_SCALE).cpu()
        assert_rounded_once(y, x, values_of(*weight), torch.tensor(GLOBAL_SCALE).double())


def test_many_rows_take_a_dense_copy(kernels: ModuleType) -> None:
    from nibble_kernels.nvfp4_sparse import nvfp4_sparse_weight_linear, pack_sparse

    weight, x = sparse_weight(48, 400), activations(70, 400, torch.bfloat16)
    factors, bias = torch.rand(48) + 0.5, torch.randn(48).bfloat16()
    packed = pack_sparse(*weight, native=False)
    options: dict[str, Any] = {"column_scale": factors, "bias": bias}
    y = nvfp4_sparse_weight_linear(x, packed, GLOBAL_SCALE, **options)
    expected = GLOBAL_SCALE * factors.double()
    assert_rounded_once(y, x, values_of(*weight), expected, bias.double())
    few = nvfp4_sparse_weight_linear(x[:16], packed, GLOBAL_SCALE, **options)
    assert_rounded_once(few, x[:16], values_of(*weight), expected, bias.double())


@pytest.fixture(scope="module", params=[False, True], ids=["software", "instructions"])
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulator")
    return compile_on_the_host("nvfp4_sparse.cpp", folder, e2m1=request.param)


def on_the_host(
    library: ctypes.CDLL,
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    from nibble_kernels.nvfp4_sparse import pack_sparse

    packed = pack_sparse(*weight, native=x.dtype == torch.float16)
    rows = len(weight[0])
    out = torch.full((len(x), rows // (2 if silu_mul else 1)), float("nan"), dtype=x.dtype)
    arguments: list[Any] = [x.dtype == torch.bfloat16]
    arguments += pointers(x, *packed[:3], column_scale, bias, out)
    arguments += [ctypes.c_float(GLOBAL_SCALE), len(x), rows, x.shape[1], silu_mul]
    library.multiply_sparse_on_the_host(*arguments)
    return out


@needs_compiler
@pytest.mark.when_changed(*OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_source_gives_the_sum(
    kernels: ModuleType, library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    for tokens, rows, columns in CASES:
        weight, x = sparse_weight(rows, columns), activations(tokens, columns, dtype)
        factors, bias = torch.rand(rows) + 0.5, torch.randn(rows).to(dtype)
        y = on_the_host(library, x, weight, factors, bias)
        expected = GLOBAL_SCALE * factors.double()
        assert_rounded_once(y, x, values_of(*weight), expected, bias.double())


@needs_compiler
@pytest.mark.when_changed(*OPERATORS)
def test_silu_mul_and_rows_of_a_batch(kernels: ModuleType, library: ctypes.CDLL) -> None:
    weight, x = sparse_weight(48, 1056), activations(16, 1056, torch.bfloat16)
    y = on_the_host(library, x, weight, silu_mul=True)
    gate, up = (GLOBAL_SCALE * x.double() @ values_of(*weight).T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    bound = exact.abs() * 2.0**-8 + 2.0**-18 * (gate * up).abs() + 1e-6
    assert ((y.double() - exact).abs() <= bound).all()
    alone = on_the_host(library, x[3:4].contiguous(), weight, silu_mul=True)
    assert_same_bits((alone,), (y[3:4],))
