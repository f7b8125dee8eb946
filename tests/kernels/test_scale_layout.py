"""The 128x4 tiles: the vectors, and there and back."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.kernel_cases import vectors


def test_vectors(kernels: object) -> None:
    from nibble_kernels.scale_layout import tile

    case = vectors("scale_swizzle_128x4")
    places = torch.arange(case["rows"] * case["Kb"])
    for row, block, offset in case["row_kb_offset"]:
        scales = (places == row * case["Kb"] + block).view(case["rows"], case["Kb"]).byte()
        assert tile(scales).view(-1).nonzero().item() == offset


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (129, 5), (300, 12)])
def test_untile_undoes_tile(kernels: object, rows: int, blocks: int) -> None:
    from nibble_kernels.scale_layout import tile, tiled_shape, untile

    scales = torch.randint(0, 127, (rows, blocks), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tiled = tile(scales)
    assert tiled.shape == tiled_shape(rows, blocks)
    assert torch.equal(untile(tiled, rows, blocks).view(torch.uint8), scales.view(torch.uint8))
