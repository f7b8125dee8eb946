"""Batches of decode attention: random page tables, NaN in all pages that no sequence reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# A result in bfloat16 (2^-9), weights of bfloat16 or float16, and sums in float32.
RELATIVE, OF_LARGEST_VALUE = 2.0**-8, 2.0**-8


@dataclass
class Case:
    """`cache` is [pages, KV heads, tokens, 2 D] in any order of strides."""

    query: Tensor
    cache: Tensor
    pages: Tensor
    lengths: Tensor
    query_begins: Tensor
    scale: float
    options: dict[str, Any] = field(default_factory=dict)

    def on(self, device: str) -> Case:
        """The same case on a device, with the same strides of the cache."""
        moved = {name: getattr(self, name).to(device) for name in ("query", "pages", "lengths")}
        options = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return Case(
            **moved,
            cache=self.cache.to(device),
            query_begins=self.query_begins.to(device),
            scale=self.scale,
            options=options,
        )

    def part(self, begin: int, count: int = 1) -> Case:
        """Some of the sequences, which have one query each."""
        some = slice(begin, begin + count)
        return replace(
            self,
            query=self.query[some],
            pages=self.pages[some],
            lengths=self.lengths[some],
            query_begins=self.query_begins[: count + 1],
        )


def make_case(
    lengths: Sequence[int],
    *,
    head_dim: int = 128,
    kv_heads: int = 2,
    group: int = 4,
    fp8: bool = False,
    queries: int | Sequence[int] = 1,
    page: int = 16,
    heads_first: bool = False,
    seed: int = 0,
    **options: Any,
) -> Case:
    """A batch; `heads_first` stores a page's heads apart (LBHNC), else its tokens (LBNHC)."""
    generator = torch.Generator().manual_seed(seed)
    each = [queries] * len(lengths) if isinstance(queries, int) else list(queries)
    width = max(1, *(-(-length // page) for length in lengths)) + 1
    count = len(lengths) * width + 2
    order = (count, kv_heads, page) if heads_first else (count, page, kv_heads)
    values = torch.randn(*order, 2 * head_dim, generator=generator)
    cache = values.to(FP8 if fp8 else torch.bfloat16)
    if not heads_first:
        cache = cache.transpose(1, 2)
    pages = torch.randperm(count, generator=generator)[: len(lengths) * width]
    pages = pages.int().view(len(lengths), width).contiguous()
    _poison(cache, pages, lengths, page)
    begins = torch.tensor([0, *each]).cumsum(0).int()
    heads = kv_heads * group
    query = torch.randn(int(begins[-1]), heads, head_dim, generator=generator).bfloat16()
    return Case(query, cache, pages, torch.tensor(lengths).int(), begins, head_dim**-0.5, options)


def _poison(cache: Tensor, pages: Tensor, lengths: Sequence[int], page: int) -> None:
    is_read = torch.zeros(cache.shape[0], page, dtype=torch.bool)
    for row, length in zip(pages, lengths, strict=True):
        tokens = torch.arange(length)
        is_read[row[tokens // page].long(), tokens % page] = True
    raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache.view(torch.int16)
    unread = (~is_read)[:, None, :, None].expand(raw.shape)
    raw.masked_fill_(unread, 0x7F if cache.dtype == FP8 else 0x7FFF)


def assert_close(found: Tensor, exact: Tensor, case: Case) -> None:
    """Within the rounding of the result and of the weights; `exact` is in float64."""
    assert not found.isnan().any(), "NaN reached a result"
    largest = exact.abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    v_scale = case.options.get("v_scale")
    spread = float(v_scale) if v_scale is not None else 1.0
    bound = RELATIVE * exact.abs() + OF_LARGEST_VALUE * (largest + spread)
    worst = ((found.double().cpu() - exact).abs() / bound).max()
    assert worst <= 1, f"{worst} of the bound"
