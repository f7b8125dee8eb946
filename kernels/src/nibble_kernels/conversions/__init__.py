"""nibble::e2m1_encode, e2m1_decode, e4m3_encode, e4m3_decode: conversions of NVFP4's two number
formats with the results of PTX's cvt.
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
    """E2M1 codes, uint8 [..., K/2], of x [..., K] in float32, bfloat16 or float16. K is even.

    Two codes per byte, that of the even column in the low nibble.
    """
    return _e2m1_encode(x)


def e2m1_decode(packed: Tensor) -> Tensor:
    """The values, float32 [..., K], of packed E2M1 codes, uint8 [..., K/2]."""
    return _e2m1_decode(packed)


def e4m3_encode(x: Tensor) -> Tensor:
    """x in float32, bfloat16 or float16 as float8_e4m3fn, saturated at ±448.

    The result does not depend on torch's cast, which differs between versions.
    """
    return _e4m3_encode(x)


def e4m3_decode(x: Tensor) -> Tensor:
    """The float32 values of float8_e4m3fn."""
    return _e4m3_decode(x)


def conversion_report(device: torch.device | str) -> dict[str, object]:
    """How this GPU converts. Compares its instructions with the software conversion.

    "e2m1" and "e4m3" are "instruction" or "software". "compared" and "mismatches" are counts of
    results; a GPU with a mismatch uses the software conversion.
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
    """Make this GPU's kernels use the software conversion; False: follow the report again.

    For tests, and to find out whether an instruction causes a wrong result. Captured CUDA graphs do
    not change.
    """
    _use_software(torch.empty(0, device=device), software)
