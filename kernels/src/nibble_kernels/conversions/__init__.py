"""nibble::e2m1_encode, e2m1_decode, e4m3_encode, e4m3_decode: NVFP4's two number formats,
exactly as PTX's cvt has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble_kernels.conversions import reference
from nibble_kernels.library import operator

__all__ = [
    "conversion_report",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_decode",
    "e4m3_encode",
    "use_software_conversions",
]

_e2m1_encode = operator(
    "e2m1_encode(Tensor x) -> Tensor",
    reference.e2m1_encode_packed,
    lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8),
)
_e2m1_decode = operator(
    "e2m1_decode(Tensor packed) -> Tensor",
    reference.e2m1_decode_packed,
    lambda packed: packed.new_empty(
        (*packed.shape[:-1], packed.shape[-1] * 2), dtype=torch.float32
    ),
)
_e4m3_encode = operator(
    "e4m3_encode(Tensor x) -> Tensor",
    reference.e4m3_encode_float8,
    lambda x: torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format),
)
_e4m3_decode = operator(
    "e4m3_decode(Tensor x) -> Tensor",
    reference.e4m3_decode_float8,
    lambda x: torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format),
)
_mismatches = operator(
    "conversion_mismatches(Tensor like) -> Tensor",
    lambda like: torch.zeros(4, dtype=torch.int64),
    lambda like: torch.empty(4, dtype=torch.int64),
)
_use_software = operator(
    "use_software_conversions(Tensor like, bool software) -> ()",
    lambda like, software: None,
    lambda like, software: None,
)


def e2m1_encode(x: Tensor) -> Tensor:
    """E2M1 codes of float32, bfloat16 or float16, two a byte along the last dimension (even),
    the even one low.
    """
    return _e2m1_encode(x)


def e2m1_decode(packed: Tensor) -> Tensor:
    """Packed E2M1 codes as float32."""
    return _e2m1_decode(packed)


def e4m3_encode(x: Tensor) -> Tensor:
    """float8_e4m3fn of float32, bfloat16 or float16, saturated at ±448 whatever torch's own cast
    does.
    """
    return _e4m3_encode(x)


def e4m3_decode(x: Tensor) -> Tensor:
    """float8_e4m3fn as float32."""
    return _e4m3_decode(x)


def conversion_report(device: torch.device | str) -> dict[str, object]:
    """How this GPU converts, found by running its instructions against the software conversion.

    "e2m1" and "e4m3" are "instruction" or "software"; "mismatches" counts results in which they
    differ, and is why a target that has the instructions would be given the software conversion.
    """
    e2m1_instruction, e4m3_instruction, compared, mismatches = _mismatches(
        torch.empty(0, device=device)
    ).tolist()
    sound = mismatches == 0
    return {
        "e2m1": "instruction" if e2m1_instruction and sound else "software",
        "e4m3": "instruction" if e4m3_instruction and sound else "software",
        "compared": compared,
        "mismatches": mismatches,
    }


def use_software_conversions(device: torch.device | str, software: bool = True) -> None:
    """Have this GPU's kernels convert by software whatever the report says, or (False) as the
    report says again.

    For tests, and to find out whether a wrong answer comes from an instruction. Captured graphs
    keep what they have.
    """
    _use_software(torch.empty(0, device=device), software)
