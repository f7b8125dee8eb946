"""nibble::bf16_linear against float64, with every level of instructions."""

from __future__ import annotations

import pytest
import torch
from nibble_kernels import implementations
from nibble_kernels.bf16_linear import bf16_linear
from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level

pytestmark = pytest.mark.skipif(
    implementations()["cpu"] != "compiled", reason="the formula itself computes"
)


@pytest.mark.parametrize("columns", [16, 33, 576, 2050])
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_sums_are_as_exact_as_their_rounding(rows: int, columns: int) -> None:
    torch.manual_seed(rows * columns)
    x, weight = torch.randn(rows, columns).bfloat16(), torch.randn(203, columns).bfloat16()
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    for level in cpu_levels():
        use_cpu_level(level)
        y = bf16_linear(x, weight).double()
        bound = exact.abs() * 2**-8 + magnitude * (columns / 16 + 8) * 2**-24
        assert ((y - exact).abs() <= bound).all()
    use_cpu_level(cpu_levels()[0])


def test_rows_and_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(11, 576).bfloat16(), torch.randn(4099, 576).bfloat16()
    threads, whole = torch.get_num_threads(), bf16_linear(x, weight)
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        assert torch.equal(bf16_linear(x, weight), whole)
    torch.set_num_threads(threads)
    assert torch.equal(torch.cat([bf16_linear(row[None], weight) for row in x]), whole)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bfloat16 rows of 8"):
        bf16_linear(torch.zeros(2, 8), torch.zeros(4, 8).bfloat16())
    with pytest.raises(RuntimeError, match="bfloat16 rows of 8"):
        bf16_linear(torch.zeros(2, 9).bfloat16(), torch.zeros(4, 8).bfloat16())
