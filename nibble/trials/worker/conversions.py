"""E2M1 and E4M3 of all bytes and of 2^20 random floats, against nearest values in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nibble_kernels import conversions
from nibble_kernels.conversions.reference import E2M1_VALUES
from torch import Tensor

from nibble.trials.trial import Trial
from nibble.trials.worker.truth import outcome

FLOATS = 1 << 20
E4M3_NAN = 0x7F


def run(trial: Trial, say: Callable[[str], None]) -> dict[str, Any]:
    """The verdict, with the number of compared results and how this device converts."""
    say("prepare:conversions")
    facts: dict[str, Any] = {"floats": FLOATS}
    if trial.device == "cuda":
        facts |= conversions.conversion_report("cuda")
    say("run:conversions")
    fault = _decoded(trial.device) or _encoded(trial.device, trial.plant is not None)
    if not fault and facts.get("mismatches"):
        facts["note"] = "the GPU's instructions differ; software converts"
    return outcome(fault, None, ran=str(facts.get("e2m1", "cpu")), facts=facts)


def _decoded(device: str) -> str:
    every = torch.arange(256).to(torch.uint8)
    found = conversions.e2m1_decode(every.to(device)).cpu().double().view(256, 2)
    signed = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)]).double()
    right = torch.stack((signed[(every & 15).int()], signed[(every >> 4).int()]), -1)
    if (wrong := (found != right).any(-1)).any():
        return f"E2M1 codes 0x{int(wrong.nonzero()[0]):02x} decode to another value"
    scales = conversions.e4m3_decode(every.view(torch.float8_e4m3fn).to(device)).cpu().double()
    right = _e4m3_values()
    is_number = (every & E4M3_NAN) != E4M3_NAN
    if (wrong := is_number & (scales != right)).any() or not scales[~is_number].isnan().all():
        byte = int(wrong.nonzero()[0]) if wrong.any() else E4M3_NAN
        return f"E4M3 0x{byte:02x} decodes to another value"
    return ""


def _e4m3_values() -> Tensor:
    """From the format's definition: sign, four bits of exponent (bias 7), three of fraction."""
    byte = torch.arange(256)
    sign, exponent, fraction = 1 - 2 * (byte >> 7), byte >> 3 & 15, (byte & 7).double()
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7).double()
    return sign * torch.where(exponent == 0, fraction / 8 * 2.0**-6, normal)


def _encoded(device: str, plant: bool) -> str:
    generator = torch.Generator().manual_seed(20)
    bits = torch.randint(-(1 << 31), 1 << 31, (FLOATS // 2,), generator=generator)
    anywhere = bits.to(torch.int32).view(torch.float32)
    near = torch.randn(FLOATS // 2, generator=generator) * 4
    near[::4] = (near[::4] * 2).round() / 2  # ties
    x = torch.cat((anywhere, near))
    packed = conversions.e2m1_encode(x.to(device)).cpu()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten()
    if plant:
        codes[5] ^= 1
    if (at := _first_difference(codes, _nearest(x, torch.tensor(E2M1_VALUES), 7, 8))) is not None:
        return f"E2M1 of {float(x[at])!r} is code {int(codes[at])}"
    bytes_ = conversions.e4m3_encode(x.to(device)).cpu().view(torch.uint8)
    right = _nearest(x, _e4m3_values()[:127], E4M3_NAN, 128)
    # The sign of a NaN says nothing.
    same = torch.where(x.isnan(), bytes_ & E4M3_NAN, bytes_)
    if (at := _first_difference(same, right)) is not None:
        return f"E4M3 of {float(x[at])!r} is 0x{int(bytes_[at]):02x}"
    return ""


def _nearest(x: Tensor, values: Tensor, nan: int, sign: int) -> Tensor:
    """Codes of the nearest of ascending `values`, the even code at the middle of two; above the
    largest it saturates. In float64, where a middle is exact.
    """
    table, magnitude = values.double(), x.double().abs()
    upper = torch.searchsorted(table, magnitude).clamp(1, len(table) - 1)
    lower = upper - 1
    middle = (table[lower] + table[upper]) / 2
    takes_upper = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    code = torch.where(takes_upper, upper, lower) + sign * x.signbit()
    return torch.where(x.isnan(), nan, code).to(torch.uint8)


def _first_difference(found: Tensor, right: Tensor) -> int | None:
    differs = found != right
    return int(differs.nonzero()[0]) if differs.any() else None
