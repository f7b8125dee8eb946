"""float32 arithmetic that gives the same bits on every device. include/nibble/exact.h is the same
in C++.

torch has no fused multiply-add, its exp differs between devices, and its order of summation is not
specified.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 1/7!, 1/6!, … 1/0!
EXP_COEFFICIENTS = (
    "0x1.a01a02p-13 0x1.6c16c2p-10 0x1.111112p-7 0x1.555556p-5 0x1.555556p-3 0x1p-1 0x1p0 0x1p0"
).split()


def fma(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c in float32 with one rounding."""
    device = next((x.device for x in (a, b, c) if isinstance(x, Tensor)), None)
    a, b, c = (torch.as_tensor(x, dtype=torch.float32, device=device).double() for x in (a, b, c))
    product = a * b  # exact: two times 24 bits in 53
    total = product + c
    # The rounding error of `total` (Knuth's two-sum). If there is one, setting the last bit to 1
    # (rounding to odd) makes the second rounding, to float32, correct.
    rest = total - product
    lost = (product - (total - rest)) + (c - rest)
    bits = total.view(torch.int64)
    even_and_inexact = (lost != 0) & lost.isfinite() & (bits & 1 == 0)
    direction = torch.where((lost > 0) == (total > 0), 1, -1)  # away from zero or towards it
    return (bits + torch.where(even_and_inexact, direction, 0)).view(torch.float64).float()


def exp(x: Tensor) -> Tensor:
    """exp(x) as 2^n times a polynomial. Infinity above 88; exp(-87) below -87."""
    too_large = x > 88
    x = torch.where(x < -87, -87.0, torch.where(too_large, 88.0, x))
    shift = 1.5 * 2.0**23
    n = fma(x, float.fromhex("0x1.715476p+0"), shift) - shift  # log2(e)
    # ln(2) in two parts; n times the first is exact.
    r = fma(n, -float.fromhex("0x1.62e4p-1"), x)
    r = fma(n, -float.fromhex("0x1.7f7d1cp-20"), r)
    p = torch.full_like(x, float.fromhex(EXP_COEFFICIENTS[0]))
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = fma(p, r, float.fromhex(coefficient))
    power = (n.nan_to_num().int() + 127) << 23
    return torch.where(too_large, torch.inf, p * power.view(torch.float32))


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return x / (1 + exp(-x))


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, by adding neighbours, then neighbouring pairs, and so on."""
    length = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (length - 1).bit_length()) - length))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
