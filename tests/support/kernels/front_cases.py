"""Calls of nibble::attention_front: random rows, a random cache, slots in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """`cache` is [pages, KV heads, tokens, 2 D] in any order of strides. `qkv` may have gaps."""

    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor
    cache: Tensor
    slots: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    neox: bool
    norms: dict[str, Any]
    scales: dict[str, Tensor]
    q_scale: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.cache.dtype == FP8

    def options(self) -> dict[str, Any]:
        """Of attention_front(), but for the cache."""
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "neox": self.neox,
            "q_scale": self.q_scale,
            **self.norms,
            **self.scales,
        }

    def on(self, device: str) -> Case:
        """The same case on a device, with a copy of the cache."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return replace(
            self,
            qkv=self.qkv.to(device),
            positions=self.positions.to(device),
            cos_sin=self.cos_sin.to(device),
            cache=self.cache.to(device, copy=True),
            slots=self.slots.to(device),
            norms={name: moved(value) for name, value in self.norms.items()},
            scales={name: moved(value) for name, value in self.scales.items()},
            q_scale=moved(self.q_scale),
        )


def make_case(
    tokens: int,
    *,
    head_dim: int = 128,
    heads: int = 8,
    kv_heads: int = 2,
    fp8: bool = False,
    norms: bool = True,
    neox: bool = True,
    rotary: int | None = None,
    page: int = 16,
    heads_first: bool = False,
    rounds_queries: bool = False,
    padded: int = 0,
    gap: int = 0,
    seed: int = 0,
) -> Case:
    """`padded`: of the last tokens, these have no slot. Every third of the others has slot -1.
    `gap`: elements between the rows of qkv.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width, most = (heads + 2 * kv_heads) * head_dim, 500
    rotary = head_dim if rotary is None else rotary
    angles = torch.outer(torch.arange(most), 1e4 ** -(torch.arange(rotary // 2) * 2 / rotary))
    pages = -(-tokens // page) + 3
    order = (kv_heads, page) if heads_first else (page, kv_heads)
    cache = random(pages, *order, 2 * head_dim).to(FP8 if fp8 else torch.bfloat16)
    slots = torch.randperm(pages * page, generator=generator)[: tokens - padded]
    slots[1::3] = -1
    weights = {name: (1 + 0.3 * random(head_dim)).bfloat16() for name in ("q_weight", "k_weight")}
    return Case(
        (3 * random(tokens, width + gap)).bfloat16()[:, :width],
        torch.randint(most, (tokens,), generator=generator),
        torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16(),
        cache if heads_first else cache.transpose(1, 2),
        slots,
        heads,
        kv_heads,
        head_dim,
        neox,
        {**weights, "epsilon": 1e-6} if norms else {},
        {"k_scale": torch.tensor([0.03]), "v_scale": torch.tensor([0.017])} if fp8 else {},
        torch.tensor([0.021]) if rounds_queries else None,
    )


def cases() -> list[Case]:
    """Every size and option, few tokens each."""
    made = []
    for head_dim in (64, 128, 256):
        for fp8 in (False, True):
            form: dict[str, Any] = {"head_dim": head_dim, "fp8": fp8}
            made += [
                make_case(5, **form),
                make_case(3, **form, neox=False, heads_first=True, rounds_queries=True),
                make_case(7, **form, norms=False, rotary=32, page=48, padded=3, gap=64),
                make_case(2, **form, neox=False, rotary=head_dim // 2, heads=5, kv_heads=1),
                make_case(1, **form, norms=False, heads=3, kv_heads=3, rounds_queries=True),
            ]
    return made


def specified(case: Case) -> tuple[Tensor, Tensor]:
    """(queries, cache) after the call, by the specification."""
    from nibble_kernels.attention_front import reference

    q, k, v = reference.prepare(
        case.qkv, case.norms.get("q_weight"), case.norms.get("k_weight"),
        case.norms.get("epsilon", 0.0), case.positions, case.cos_sin, case.neox,
        case.heads, case.kv_heads,
    )  # fmt: skip
    cache = case.on(str(case.qkv.device)).cache
    scales = (case.scales.get(name) for name in ("k_scale", "v_scale"))
    reference.write(k, v, case.slots, cache, *scales)
    return (q if case.q_scale is None else reference.rounded_queries(q, case.q_scale)), cache


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor, for comparisons of FP8 and of NaN."""
    return x.contiguous().view(torch.uint8)
