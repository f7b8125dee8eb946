"""Calls of nibble::gated_delta_step and gated_delta_prompts with random numbers, and what they are
to give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HEAD, TAPS = 128, 4


@dataclass
class Case:
    """`tensors` and `options` are arguments of gated_delta_step, or of gated_delta_prompts."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def on(self, device: str) -> Case:
        """A copy on a device. Strides are kept."""
        return replace(
            self, tensors={name: one.to(device, copy=True) for name, one in self.tensors.items()}
        )

    @property
    def is_prompts(self) -> bool:
        return "starts" in self.tensors

    def arguments(self) -> dict[str, Any]:
        return self.tensors | self.options


def make_case(
    tokens: int,
    key_heads: int,
    value_heads: int,
    columns: int,
    *,
    state: torch.dtype = torch.float32,
    interleaved: bool = False,
    sigmoid: bool = False,
    padded: int = 0,
    channels_first: bool = False,
    seed: int = 0,
) -> Case:
    """padded: tokens without a slot: the second one has slot 0, the others are the last."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, by: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=random) * by

    slots, channels = tokens + 3, (2 * key_heads + value_heads) * HEAD
    conv_state = normal(slots, channels, TAPS - 1).bfloat16()
    if not channels_first:  # vLLM's usual order
        conv_state = conv_state.transpose(1, 2).contiguous().transpose(1, 2)
    places = torch.randperm(slots - 1, generator=random)[: tokens - max(0, padded - 1)] + 1
    if padded:
        places[1 % tokens] = 0
    return Case(
        {
            "x": normal(tokens, columns).bfloat16(),
            "gates": normal(2 * value_heads, columns, by=columns**-0.5).bfloat16(),
            "qkvz": normal(tokens, 2 * (key_heads + value_heads) * HEAD).bfloat16(),
            "conv_weight": normal(channels, TAPS, by=0.5).bfloat16(),
            "conv_state": conv_state,
            "state": normal(slots, value_heads, HEAD, HEAD, by=0.3).to(state),
            "slots": places.int(),
            "a_log": normal(value_heads, by=0.5),
            "dt_bias": normal(value_heads),
            "norm": 1 + normal(HEAD, by=0.1),
            "out": torch.full((tokens, value_heads, HEAD), float("nan")).bfloat16(),
        },
        {"interleaved": interleaved, "sigmoid": sigmoid, "epsilon": 1e-6},
    )


def make_prompts(
    lengths: tuple[int, ...],
    key_heads: int,
    value_heads: int,
    *,
    columns: int = 64,
    padding: int = 0,
    **more: Any,
) -> Case:
    """Sequences of these lengths. Every third begins without a state; padding: tokens behind the
    last sequence.
    """
    tokens = sum(lengths) + padding
    case = make_case(tokens, key_heads, value_heads, columns, **more)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tensors = case.tensors | {
        # vLLM's slots are the first column of its block table.
        "slots": case.tensors["slots"][: len(lengths)].repeat_interleave(2)[::2],
        "starts": starts,
        "has_state": torch.arange(len(lengths)) % 3 != 0,
    }
    return Case(tensors, case.options | {"live_tokens": sum(lengths)})


PROMPTS: tuple[dict[str, Any], ...] = tuple(
    {"lengths": lengths, **more}
    for lengths, more in (
        ((1,), {"key_heads": 1, "value_heads": 1}),
        ((2, 1, 3, 4), {"key_heads": 1, "value_heads": 2, "interleaved": True, "padding": 3}),
        ((17, 5, 32), {"key_heads": 1, "value_heads": 2, "sigmoid": True}),
        ((3, 33), {"key_heads": 2, "value_heads": 6, "channels_first": True, "padded": 1}),
    )
)

CASES: tuple[dict[str, Any], ...] = (
    {"tokens": 1, "key_heads": 2, "value_heads": 4, "columns": 256, "interleaved": True},
    {"tokens": 3, "key_heads": 1, "value_heads": 2, "columns": 2048, "sigmoid": True},
    {"tokens": 4, "key_heads": 1, "value_heads": 1, "columns": 72, "padded": 2},
    {"tokens": 2, "key_heads": 1, "value_heads": 8, "columns": 64, "interleaved": True},
    {"tokens": 2, "key_heads": 2, "value_heads": 6, "columns": 4160, "channels_first": True},
)


def expected(case: Case) -> Case:
    """The case after the call, by the definition in torch."""
    from nibble_kernels.gated_delta import reference

    result = case.on("cpu")
    definition = reference.prompts if case.is_prompts else reference.step
    definition(**result.arguments())
    return result


def check(found: Case, wanted: Case) -> None:
    """Sums in another order: bfloat16 may round to a neighbour, also b and a, of which a state
    depends.
    """
    one, other = found.on("cpu").tensors, wanted.tensors
    assert torch.equal(one["conv_state"], other["conv_state"])
    for name, limit in (("out", 0.02), ("state", 0.02)):
        difference = (one[name].double() - other[name].double()).abs()
        assert difference.max() <= limit * other[name].double().abs().max(), name
        # Almost all of them differ by no more than their own rounding.
        size = other[name].double().square().mean().sqrt()
        assert difference.square().mean().sqrt() <= 0.002 * size, name
