"""Conversions of E2M1 and E4M3 in plain torch float32: the specification.

They give the results of PTX's cvt.rn.satfinite: ties to even, saturation, signed zeros; NaN becomes
+6 in E2M1 and 0x7F in E4M3.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0


def e2m1_encode(x: Tensor) -> Tensor:
    """Codes 0 to 15, uint8, one per element: a sign bit and the index of a value.

    A number halfway between two values gets the even index.
    """
    x = x.float()
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        code += magnitude > middle if index % 2 == 0 else magnitude >= middle
    return torch.where(x.isnan(), 7, code | x.signbit().byte() << 3).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """The float32 values of codes, one per byte."""
    values = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=codes.device)
    return values[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Two codes per byte along the last dimension, the even one in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The reverse of `pack`: one code per byte."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e4m3_encode(x: Tensor) -> Tensor:
    """The E4M3 byte of each element, uint8. Clamps first, because torch up to 2.11 converts numbers
    that should saturate to NaN.
    """
    x = x.float()
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """The float32 values of E4M3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def e2m1_encode_packed(x: Tensor) -> Tensor:
    """The operator nibble::e2m1_encode."""
    return pack(e2m1_encode(x))


def e2m1_decode_packed(packed: Tensor) -> Tensor:
    """The operator nibble::e2m1_decode."""
    return e2m1_decode(unpack(packed))


def e4m3_encode_float8(x: Tensor) -> Tensor:
    """The operator nibble::e4m3_encode."""
    return e4m3_encode(x).view(torch.float8_e4m3fn)


def e4m3_decode_float8(x: Tensor) -> Tensor:
    """The operator nibble::e4m3_decode."""
    return e4m3_decode(x.view(torch.uint8))
