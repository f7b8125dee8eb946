"""The CPU's products with AMX's tiles (nvfp4_linear/matmul_amx.cpp) without AMX: the instructions
are stood in for (emulator/nibble/amx_tiles.h), with Intel's order of additions.

Layouts, tails and what is read and written are thus tested on any processor with AVX-512. A
processor with AMX runs its own instructions in test_nvfp4_linear.py.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tests.support.changes import OPERATORS
from tests.support.kernels.emulated import compile_on_the_host, needs_compiler, pointers
from tests.support.kernels.kernel_cases import packed_weight, values_of

pytestmark = [needs_compiler, pytest.mark.when_changed(*OPERATORS)]

ROWS = (1, 9, 15, 16, 17, 33)
# An odd block alone, at the end of a tile and of a panel; panels of 16 blocks.
BLOCKS = (1, 2, 3, 15, 16, 17, 33, 65, 130)
OUTPUTS = (16, 48, 80)  # one tile, three, and a panel of four with one more


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = compile_on_the_host("amx.cpp", tmp_path_factory.mktemp("emulator"))
    if not found.can_run():
        pytest.skip("weights are decoded with AVX-512, which this processor lacks")
    return found


def packed(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Codes and scales of a packed weight, its tiles and blocks."""
    from nibble_kernels.nvfp4_linear.packed import _pack_reference

    codes, packed_scales = _pack_reference(weight, scales)
    return codes, packed_scales, codes.shape[0], codes.shape[1]


def multiply_floats(library: ctypes.CDLL, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    codes, packed_scales, tiles, blocks = packed(weight, scales)
    sums = torch.full((len(x), 16 * tiles), torch.nan)
    sizes = ctypes.c_int64(tiles), ctypes.c_int64(blocks)
    of_codes, of_scales, of_x, of_sums = pointers(codes, packed_scales, x.contiguous(), sums)
    library.multiply_floats(of_codes, of_scales, *sizes, of_x, ctypes.c_int64(len(x)), of_sums)
    return sums


@pytest.mark.parametrize("blocks", BLOCKS)
def test_sums_are_those_of_float32(kernels: object, library: ctypes.CDLL, blocks: int) -> None:
    """Within half of what README.md allows, and a row does not depend on the others."""
    columns = 16 * blocks
    for outputs in OUTPUTS:
        weight, scales = packed_weight(outputs, columns)
        exact_weight = values_of(weight, scales)
        x = torch.randn(max(ROWS), columns, dtype=torch.bfloat16)
        all_rows = multiply_floats(library, x, weight, scales)
        exact, magnitude = (
            op(x.double()) @ op(exact_weight).T for op in (torch.positive, torch.abs)
        )
        assert ((all_rows.double() - exact).abs() <= (columns + 2) / 2 * 2**-24 * magnitude).all()
        for rows in ROWS:
            assert torch.equal(multiply_floats(library, x[:rows], weight, scales), all_rows[:rows])


def test_every_pair_of_codes_with_every_scale_is_exact(
    kernels: object, library: ctypes.CDLL
) -> None:
    bytes_ = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    weight = torch.arange(256).to(torch.uint8).expand(len(bytes_), -1).contiguous()
    scales = bytes_[:, None].expand(-1, 32).contiguous().view(torch.float8_e4m3fn)
    found = multiply_floats(library, torch.eye(512).bfloat16(), weight, scales)
    assert torch.equal(found[:, : len(bytes_)].double(), values_of(weight, scales).T + 0.0)
    assert (found[:, len(bytes_) :] == 0).all()


@pytest.mark.parametrize(("rows", "blocks"), [(9, 3), (9, 16), (16, 3), (16, 16)])
def test_infinity_and_nan_stay_in_their_row(
    kernels: object, library: ctypes.CDLL, rows: int, blocks: int
) -> None:
    weight = torch.full((16, 8 * blocks), 0x22, dtype=torch.uint8)  # ones
    scales = torch.ones(16, blocks).to(torch.float8_e4m3fn)
    x = torch.ones(rows, 16 * blocks, dtype=torch.bfloat16)
    x[0, 3], x[1, -1] = torch.inf, torch.nan
    found = multiply_floats(library, x, weight, scales)
    assert (found[0] == torch.inf).all() and found[1].isnan().all()
    assert (found[2:] == 16 * blocks).all()
