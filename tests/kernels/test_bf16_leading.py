"""nibble::bf16_leading: the largest products are those of bf16_linear, bit for bit."""

from __future__ import annotations

import pytest
import torch
from nibble_kernels import implementations
from nibble_kernels.bf16_leading import Sketch, bf16_leading, sketch_of
from nibble_kernels.bf16_linear import bf16_linear
from nibble_kernels.nvfp4_linear import cpu_levels, use_cpu_level
from torch import Tensor

INF, NAN = float("inf"), float("nan")
COMPILED = implementations()["cpu"] == "compiled"


def sketch(weight: Tensor) -> Sketch:
    found = sketch_of(weight)
    assert found is not None
    return found


def leading(x: Tensor, weight: Tensor, *counts: int) -> Tensor:
    each = torch.tensor(counts if len(counts) == len(x) else counts * len(x))
    return bf16_leading(x, weight, sketch(weight), each)


def assert_largest_are_right(x: Tensor, weight: Tensor, *counts: int) -> float:
    """Returns the share of products that were computed."""
    found, exact = leading(x, weight, *counts), bf16_linear(x, weight)
    is_computed = found != -INF
    assert torch.equal(found[is_computed], exact[is_computed])
    for row, count in enumerate(counts if len(counts) == len(x) else counts * len(x)):
        least = exact[row].float().topk(min(count, len(weight))).values[-1]
        assert is_computed[row][exact[row] >= least].all()
    return is_computed.float().mean().item()


@pytest.mark.parametrize("columns", [16, 33, 576, 4100])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_the_largest_products_have_the_bits_of_the_whole_product(rows: int, columns: int) -> None:
    torch.manual_seed(rows * columns)
    x, weight = torch.randn(rows, columns).bfloat16(), torch.randn(5003, columns).bfloat16()
    for level in cpu_levels():
        use_cpu_level(level)
        for count in (1, 20):
            share = assert_largest_are_right(x, weight, count)
            assert not COMPILED or columns < 100 or share < 0.2
    use_cpu_level(cpu_levels()[0])


def test_rows_have_counts_of_their_own() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(900, 64).bfloat16()
    assert_largest_are_right(x, weight, 1, 50, 3, 900, 2000)


def test_products_that_round_to_the_same_number_are_all_there() -> None:
    """The first of equal logits is a greedy request's token."""
    torch.manual_seed(2)
    weight = torch.randn(40, 128).bfloat16().repeat(30, 1)
    weight += torch.randn_like(weight) * 1e-3  # most products of copies round to one number
    x = torch.randn(3, 128).bfloat16() * 8
    assert_largest_are_right(x, weight, 1)
    assert torch.equal(
        leading(x, weight, 1).float().argmax(1), bf16_linear(x, weight).float().argmax(1)
    )


def test_outliers_and_numbers_of_all_sizes_stay_within_the_bound() -> None:
    torch.manual_seed(3)
    for power in (1, 4, 12):
        weight = (torch.randn(3000, 300) * 10 ** (torch.randn(3000, 300) * power / 4)).bfloat16()
        x = (torch.randn(4, 300) * 10 ** (torch.randn(4, 300) * power / 4)).bfloat16()
        x[:, 7] *= 1000
        assert_largest_are_right(x, weight, 4)
    for size in (1e-41, 1e-38, 1e-20, 1e18):
        x, weight = torch.randn(2, 64) * size, torch.randn(500, 64) * size
        assert_largest_are_right(x.bfloat16(), weight.bfloat16(), 2)


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_row_that_is_no_number_is_computed_as_a_whole(number: float) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    x[0, 3] = number
    found, exact = leading(x, weight, 1), bf16_linear(x, weight)
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=0, equal_nan=True)
    assert_largest_are_right(x[1:], weight, 1)


def test_zeros_give_zeros() -> None:
    x, weight = torch.zeros(1, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    assert not leading(x, weight, 1).any()
    weight[:200] = 0
    assert_largest_are_right(torch.randn(3, 64).bfloat16(), weight, 1)


def test_a_weight_that_is_no_number_has_no_sketch() -> None:
    for number in (NAN, INF):
        weight = torch.zeros(5000, 32).bfloat16()
        weight[4500, 3] = number
        assert sketch_of(weight) is None


def test_rows_and_threads_change_no_product() -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(6, 576).bfloat16(), torch.randn(9001, 576).bfloat16()
    threads, whole = torch.get_num_threads(), leading(x, weight, 5)
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        assert torch.equal(leading(x, weight, 5), whole)
    torch.set_num_threads(threads)
    each = torch.cat([leading(row[None], weight, 5) for row in x])
    assert torch.equal(each, whole)


@pytest.mark.skipif(not COMPILED, reason="the formula itself computes")
def test_what_does_not_fit_is_refused() -> None:
    weight = torch.zeros(4, 8).bfloat16()
    own, one = sketch(weight), torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="bfloat16 rows of 8"):
        bf16_leading(torch.zeros(1, 8), weight, own, one)
    with pytest.raises(RuntimeError, match="those of sketch_of"):
        bf16_leading(torch.zeros(1, 8).bfloat16(), weight, own._replace(codes=own.codes[:3]), one)
    with pytest.raises(RuntimeError, match="int64 count for each row"):
        bf16_leading(torch.zeros(2, 8).bfloat16(), weight, own, one)
