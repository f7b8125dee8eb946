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
        size = logits.shape[-1]
        counts = [size] * len(logits) if k is None else k.tolist()
        for row, count, share in zip(logits, counts, 1 - p, strict=True):
            keep_top(row, count, share)
        return logits

    replace(topk_topp_sampler, name, apply_to_few)


def keep_top(row: Tensor, count: int, share: Tensor) -> None:
    """Set logits to -inf, in place, but for the `count` largest and those equal to their least; of
    these, but for the least likely that have a `share` of the probability together.

    row: float32 [vocabulary]; share: float32 []. The largest logit stays. Of equal ones the first
    go first. A row with NaN or without a finite logit stays as it is.
    """
    if count < len(row):
        largest = row.topk(count).values
        if largest[0].isnan():
            return
        tokens = (row >= largest[-1]).nonzero().squeeze(1)
        chosen, at = row[tokens].sort(stable=True)
        likely, rest = chosen.softmax(-1), 0.0
    else:
        every = row.softmax(-1)
        is_likely = every > share / len(row)
        tokens = is_likely.nonzero().squeeze(1)
        chosen, at = row[tokens].sort(stable=True)
        likely = every[tokens[at]]
        rest = every.masked_fill_(is_likely, 0.0).sum(dtype=torch.float64)
    if not len(tokens) or likely[-1].isnan():
        return
    stays = (likely.cumsum(-1, dtype=torch.float64) + rest).float() > share
    stays[-1] = True
    row.fill_(float("-inf"))
    row[tokens[at[stays]]] = chosen[stays]
