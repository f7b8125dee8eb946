"""top-p on vLLM's CPU platform, without sorting the vocabulary.

vLLM 0.32 sorts all logits of a row (v1/sample/ops/topk_topp_sampler.py:477). Tokens below a share
of (1 - p) / vocabulary have together at most 1 - p, so they are never among those that top-p keeps:
only the others are sorted. The same tokens stay, except where a sum of probabilities is 1 - p
within float32 rounding; among equal logits, which of them stay is chance in vLLM.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.ops import topk_topp_sampler

from nibble.engine.plugin.require import replace, required


def sort_few_logits() -> None:
    """Replace apply_top_k_top_p_pytorch. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    name = "apply_top_k_top_p_pytorch"
    apply = required(topk_topp_sampler, name, "logits", "k", "p", "allow_cpu_sync")

    @functools.wraps(apply)
    def apply_to_few(
        logits: Tensor, k: Tensor | None, p: Tensor | None, allow_cpu_sync: bool = False
    ) -> Tensor:
        if p is None:
            return apply(logits, k, p, allow_cpu_sync)
        counts = None if k is None else k.tolist()
        keep_top(logits, counts or [logits.shape[-1]] * len(logits), 1 - p)
        return logits

    replace(topk_topp_sampler, name, apply_to_few)


def keep_top(logits: Tensor, counts: list[int], shares: Tensor) -> None:
    """Set logits to -inf, in place, but for the `counts` largest of each row and those equal to
    their least; of these, but for the least likely that have a `share` of the probability together.

    logits: float32 [rows, vocabulary]; shares: float32 [rows]. The largest logit stays. Of equal
    ones the first go first. A row with NaN or without a finite logit stays as it is.
    """
    size = logits.shape[-1]
    most = max((count for count in counts if count < size), default=0)
    largest = logits.topk(most).values if most else logits
    every = logits.softmax(-1) if size in counts else logits
    for number, (row, count, share) in enumerate(zip(logits, counts, shares, strict=True)):
        if count == size:
            found = _likely(row, every[number], share)
        else:
            found = _largest(row, largest[number, :count])
        if found is None:
            continue
        tokens, likely, rest = found
        stays = (likely.cumsum(-1, dtype=torch.float64) + rest).float() > share
        stays[-1] = True
        kept = tokens[stays]
        values = row[kept]
        row.fill_(float("-inf"))
        row[kept] = values


# Tokens from the least likely to the most, their probabilities, and that of all tokens before them.
_Sorted = tuple[Tensor, Tensor, Tensor | float]


def _largest(row: Tensor, largest: Tensor) -> _Sorted | None:
    if largest[0].isnan():
        return None
    tokens = (row >= largest[-1]).nonzero().squeeze(1)
    values, at = row[tokens].sort(stable=True)
    likely = values.softmax(-1)
    return None if likely[-1].isnan() else (tokens[at], likely, 0.0)


def _likely(row: Tensor, every: Tensor, share: Tensor) -> _Sorted | None:
    is_likely = every > share / len(row)
    tokens = is_likely.nonzero().squeeze(1)
    if not len(tokens):
        return None
    tokens = tokens[row[tokens].sort(stable=True).indices]
    likely = every[tokens]
    return tokens, likely, every.masked_fill_(is_likely, 0.0).sum(dtype=torch.float64)
