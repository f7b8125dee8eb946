"""How far greedy answers of two vLLMs agree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def agreement(ours: Iterable[Any], theirs: Iterable[Any]) -> tuple[float, list[int]]:
    """The largest difference of a log-probability, each as long as the answers agree, and how many
    tokens of each answer do. Answers are vLLM's CompletionOutputs of one length.
    """
    largest, same = 0.0, []
    for one, other in zip(ours, theirs, strict=True):
        same.append(0)
        for place, token_id in enumerate(one.token_ids):
            mine, others = one.logprobs[place], other.logprobs[place]
            differences = [abs(mine[token].logprob - others[token].logprob) for token in mine]
            largest = max(largest, *differences)
            if token_id != other.token_ids[place]:
                break
            same[-1] += 1
    return largest, same
