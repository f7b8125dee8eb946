"""The norm's own source (rms_norm/norm.cuh) without a GPU: compiled by g++, with lanes that take
turns. In rows, and in the order in which the warpgroup kernel multiplies.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import assert_same_bits, in_order

EPSILON = 1e-5

pytestmark = [needs_compiler, pytest.mark.when_changed(*OPERATORS)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_on_the_host("rms_norm.cpp", tmp_path_factory.mktemp("emulator"))


def normalize(
    library: ctypes.CDLL, x: Tensor, weight: Tensor, tile: int, threads: int, out: Tensor
) -> Tensor:
    sizes = (*x.shape, tile, threads)
    arguments = (*pointers(x, weight, out), ctypes.c_float(EPSILON), *sizes)
    library.normalize_on_the_host(*arguments)
    return out


@pytest.mark.parametrize(
    ("columns", "threads"), [(8, 32), (576, 128), (1280, 64), (4096, 512), (2176, 512)]
)
def test_a_row_is_divided_by_its_root_mean_square_and_rounded_twice(
    library: ctypes.CDLL, columns: int, threads: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, columns).bfloat16() * 3
    weight = (torch.rand(columns) + 0.5).bfloat16()
    y = normalize(library, x, weight, 0, threads, torch.full_like(x, torch.nan))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    assert ((y.double() - exact).abs() <= exact.abs() * 2.01 * 2.0**-8 + 1e-7).all()


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize(("columns", "threads"), [(128, 32), (1280, 64), (2176, 512)])
def test_an_ordered_result_has_the_values_of_rows_in_their_places(
    library: ctypes.CDLL, columns: int, threads: int, tile: int
) -> None:
    """Of more than a tile; half of a warp has no columns. Rows past the last stay as they were."""
    torch.manual_seed(0)
    x = torch.randn(tile + 3, columns).bfloat16()
    weight = (torch.rand(columns) + 0.5).bfloat16()
    rows = normalize(library, x, weight, 0, threads, torch.full_like(x, torch.nan))
    untouched = torch.full((2 * tile, columns), 7.0).bfloat16()
    ordered = normalize(library, x, weight, tile, threads, untouched.clone())
    untouched[: len(x)] = rows
    assert_same_bits((ordered.flatten(),), (in_order(untouched, tile).flatten(),))
