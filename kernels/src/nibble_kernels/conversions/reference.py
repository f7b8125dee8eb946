"""E2M1 and E4M3 as PTX's cvt.rn.satfinite converts them: ties to even, saturation, signed zeros,
NaN to +6 and 0x7F.

The specification of every other implementation, in plain torch float32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0


def e2m1_encode(x: Tensor) -> Tensor:
    """Codes 0…15, one a byte: a sign and the index of a value. Halfway between two values the
    even index wins.
    """
    x = x.float()
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        code += magnitude > middle if index % 2 == 0 else magnitude >= middle
    return torch.where(x.isnan(), 7, code | x.signbit().byte() << 3).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Codes, one a byte, as float32."""
    values = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=codes.device)
    return values[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte along the last dimension, the even one in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Codes, one a byte."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e4m3_encode(x: Tensor) -> Tensor:
    """The byte of each element. Clamped first: torch up to 2.11 makes NaN of what it should
    saturate.
    """
    x = x.float()
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Bytes as float32."""
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
