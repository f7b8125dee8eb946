"""Decode attention over a paged cache in plain torch: the specification of the compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    query_begins: Tensor,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp) computed in `dtype`; query [tokens, heads, D], cache
    [pages, KV heads, tokens, 2 D].

    The last query token of a sequence is its last token. `window` counts the tokens that a query
    sees, itself included; 0 means all. A sink is one more key with this score and the value 0.
    """
    tokens, heads, head_dim = query.shape
    group, page = heads // cache.shape[1], cache.shape[2]
    out = torch.zeros(tokens, heads, head_dim, dtype=dtype, device=query.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=dtype, device=query.device)
    begins = query_begins.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        begin, end = begins[sequence : sequence + 2]
        for token in range(begin, end):
            last = length - (end - 1 - token)
            first = max(0, last - window) if window else 0
            if last <= first:
                continue
            at = torch.arange(first, last, device=query.device)
            rows = cache[pages[sequence, at // page].long(), :, at % page].to(dtype)
            keys, values = rows.split(head_dim, dim=-1)
            if k_scale is not None:
                keys = keys * k_scale.to(dtype)
            if v_scale is not None:
                values = values * v_scale.to(dtype)
            queries = query[token].to(dtype).unflatten(0, (-1, group))
            scores = torch.einsum("hgd,thd->hgt", queries, keys) * scale
            if soft_cap:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            scores = scores.flatten(0, 1)
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(dtype)[:, None]], dim=-1)
            lse[token] = torch.logsumexp(scores, dim=-1)
            weights = torch.softmax(scores, dim=-1)[:, : len(at)].unflatten(0, (-1, group))
            out[token] = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)
    return out, lse
