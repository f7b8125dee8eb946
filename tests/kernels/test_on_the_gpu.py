"""What only a GPU can show: software and instructions alike, large tensors, and the plain torch
code on its own device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.kernels.kernel_cases import activations, assert_same_bits, fitting_scale

pytestmark = pytest.mark.gpu


def all_operators(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every quantizer's results for the two layouts and both precisions."""
    from nibble_kernels.activation_quant import (
        add_rmsnorm_nvfp4_quant,
        nvfp4_quant,
        silu_mul_nvfp4_quant,
    )
    from nibble_kernels.conversions import e2m1_encode, e4m3_encode
    from nibble_kernels.quartet2.quantize import quant_fp4

    results: list[torch.Tensor] = [e2m1_encode(x), e4m3_encode(x)]
    for tiled, exact in ((True, True), (False, False)):
        flags: dict[str, Any] = {"tiled": tiled, "exact": exact}
        results += nvfp4_quant(x, scale, **flags)
        results += silu_mul_nvfp4_quant(x, scale, **flags)
        results += add_rmsnorm_nvfp4_quant(x, x, x[0], scale, 1e-6, **flags)
        results += quant_fp4(x, four_over_six=True, **flags)
        results += quant_fp4(x, x.abs().max().float() / 2, **flags)
    return tuple(one.cpu() for one in results)


def test_the_software_conversions_give_the_same_bits(kernels: ModuleType) -> None:
    from nibble_kernels.conversions import use_software_conversions

    x = activations(300, 1056, torch.bfloat16)
    x[7, 40:45], x[9, 100] = float("nan"), float("inf")
    x, scale = x.cuda(), fitting_scale(x[:5], 3).cuda()
    expected = all_operators(x, scale)
    use_software_conversions("cuda")
    try:
        found = all_operators(x, scale)
    finally:
        use_software_conversions("cuda", False)
    assert_same_bits(found, expected)


def test_more_rows_than_a_grid_has(kernels: ModuleType) -> None:
    """65535 groups of rows are started at a time; the loop over the rest is walked here."""
    from nibble_kernels.activation_quant import nvfp4_quant
    from nibble_kernels.quartet2.quantize import quant_fp4

    x = torch.randn(65535 * 64 + 1000, 16, dtype=torch.bfloat16)
    scale = torch.tensor([300.0])
    for tiled in (True, False):
        found = nvfp4_quant(x.cuda(), scale.cuda(), tiled=tiled) + quant_fp4(x.cuda(), tiled=tiled)
        expected = nvfp4_quant(x, scale, tiled=tiled) + quant_fp4(x, tiled=tiled)
        assert_same_bits(tuple(one.cpu() for one in found), expected, tiled)


def test_more_than_four_gibibytes(kernels: ModuleType) -> None:
    """The last rows of a large tensor come out as they do alone."""
    from nibble_kernels.activation_quant import (
        add_rmsnorm_nvfp4_quant,
        nvfp4_quant,
        silu_mul_nvfp4_quant,
    )

    x = torch.randn(140_032, 32768, dtype=torch.bfloat16, device="cuda")
    last, one = x[-128:].contiguous(), torch.ones(1, device="cuda")
    assert_same_bits(
        tuple(all_rows[-128:] for all_rows in nvfp4_quant(x, one, tiled=False)),
        nvfp4_quant(last, one, tiled=False),
    )
    tiled_alone = nvfp4_quant(last, one)[1]
    assert_same_bits((nvfp4_quant(x, one)[1][-128:],), (tiled_alone,))
    assert_same_bits(
        tuple(all_rows[-128:] for all_rows in silu_mul_nvfp4_quant(x, one, tiled=False)),
        silu_mul_nvfp4_quant(last, one, tiled=False),
    )
    found = add_rmsnorm_nvfp4_quant(x, x, x[0], one, 1e-6, tiled=False)
    alone = add_rmsnorm_nvfp4_quant(last, last, x[0], one, 1e-6, tiled=False)
    assert_same_bits(tuple(all_rows[-128:] for all_rows in found), alone)


def test_the_plain_torch_code_gives_the_same_bits_there(kernels: ModuleType) -> None:
    from nibble_kernels.activation_quant import reference
    from nibble_kernels.quartet2.quantize.reference import quant_fp4

    x, weight, scale = (
        activations(50, 256, torch.bfloat16),
        torch.rand(256).bfloat16(),
        torch.tensor([50.0]),
    )

    def results(device: str) -> tuple[torch.Tensor, ...]:
        y, w, g = x.to(device), weight.to(device), scale.to(device)
        found = reference.nvfp4_quant(y, g, True, True) + reference.silu_mul_nvfp4_quant(
            y, g, False, True
        )
        found += reference.add_rmsnorm_nvfp4_quant(y, y, w, g, 1e-6, True, True) + quant_fp4(
            y, None, True, 1.0, True, True
        )
        return tuple(one.cpu() for one in found)

    assert_same_bits(results("cuda"), results("cpu"))
