"""The float32 arithmetic that results on every device rest on."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to a rational number, ties to even."""
    near = torch.tensor(float(value), dtype=torch.float32)
    above, below = near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(-torch.inf))

    def distance(x: torch.Tensor) -> tuple[Fraction, bool]:
        return abs(Fraction(x.item()) - value), bool(x.view(torch.int32) % 2)

    return min((near, above, below), key=distance).item()


def test_fma_rounds_once(kernels: object) -> None:
    from nibble_kernels.exact import fma

    generator = torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.randint(-20, 20, (3, 3000), generator=generator)
    a, b, c = torch.randn(3, 3000, generator=generator) * powers
    found = fma(a, b, c)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        assert result == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z))


def test_fma_where_rounding_twice_is_wrong(kernels: object) -> None:
    from nibble_kernels.exact import fma

    a, b, c = torch.tensor(1 + 2.0**-12), torch.tensor(1 + 2.0**-12), torch.tensor(2.0**-80)
    # Just above the tie 1 + 2^-11 + 2^-24
    exact = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
    assert fma(a, b, c).item() == nearest_float32(exact)
    assert fma(a, b, c).item() != (a.double() * b.double() + c.double()).float().item()


def test_fma_of_infinity_and_nan(kernels: object) -> None:
    from nibble_kernels.exact import fma

    inf, nan = float("inf"), float("nan")
    assert fma(inf, 1.0, 1.0).item() == inf
    assert fma(3e38, 3e38, 0.0).item() == inf
    assert (
        fma(
            torch.tensor([inf, nan, 1.0]),
            torch.tensor([0.0, 1.0, 1.0]),
            torch.tensor([1.0, 1.0, nan]),
        )
        .isnan()
        .all()
    )


@pytest.mark.parametrize("length", [1, 2, 3, 16, 100])
def test_tree_sum_adds_neighbours_first(kernels: object, length: int) -> None:
    from nibble_kernels.exact import tree_sum

    x = torch.randn(length)

    def tree(values: list[torch.Tensor]) -> torch.Tensor:
        if len(values) == 1:
            return values[0]
        half = 1 << (len(values) - 1).bit_length() - 1
        return tree(values[:half]) + tree(values[half:])

    assert tree_sum(x).item() == tree(list(x)).item()


def test_exp_is_within_two_units(kernels: object) -> None:
    from nibble_kernels.exact import exp

    x = torch.linspace(-86.9, 86.9, 200_001)
    error = (exp(x).double() / x.double().exp() - 1).abs().max().item()
    assert error < 2 * 2.0**-23
