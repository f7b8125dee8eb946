"""The specification of nibble::gumbel_argmax, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """Of each row the token whose logit - log(-log(u)) is the largest, where u is (b + 1/2) / 2^53
    and b the upper 53 bits of SplitMix64's number `token` + 1 after that of the row's `seeds`.
    """
    counts = torch.arange(1, logits.shape[1] + 1, device=logits.device)
    bits = _shifted(_mixed(_mixed(seeds)[:, None] + counts * _STEP), 11)
    noise = -(-((bits.double() + 0.5) * 2.0**-53).log()).log()
    return (logits.double() + noise).argmax(-1)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's function of 64 bits; products wrap."""
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
