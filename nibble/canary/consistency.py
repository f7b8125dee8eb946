"""Scores generated tokens again as one prompt: decode and prefill have to agree.

Needs nothing known about the model. Sampling with top_k=1 has to choose the best token too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nibble.canary.client import Answer, Asker
from nibble.canary.finding import Finding

PROMPT = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The"
    " quick brown"
)
TOKENS = 24
# Mean |difference| of log-probs in nats. Decode and prefill kernels round differently: 0.02 was
# seen on the CPU in BF16.
MEAN_LIMIT = 0.25
NEAR_TIE = 0.3  # nats between the best two tokens, below which either may come out


def check_consistency(asker: Asker, samples: bool = True) -> Finding:
    """Greedy tokens and those sampled with top_k=1 against the best ones, and log-probs against a
    second scoring.

    Without `samples` nothing is sampled.
    """
    answer = asker.answer(PROMPT, TOKENS, ignore_eos=True)
    problem = not_greedy(answer) or (_not_best_when_sampled(asker, answer) if samples else "")
    if problem:
        return Finding("consistency", "failed", problem)
    mean = mean_difference(
        answer.logprobs, asker.score([*answer.prompt_ids, *answer.ids])[-len(answer.ids) :]
    )
    detail = f"{len(answer.ids)} generated tokens scored again differ by {mean:.3f} nats on average"
    if not mean <= MEAN_LIMIT:  # NaN is not
        return Finding("consistency", "failed", f"{detail}, at most {MEAN_LIMIT} is rounding")
    return Finding("consistency", "passed", detail)


def not_greedy(answer: Answer, asked: str = "temperature 0") -> str:
    """Why an answer to what was `asked` is none of the likeliest tokens; empty where it is."""
    for place, (own, best) in enumerate(zip(answer.logprobs, answer.best, strict=True)):
        if math.isnan(own) or math.isnan(best):
            return f"token {place} has no log-prob: the logits are not finite"
        if best - own > NEAR_TIE:
            return (
                f"{asked} chose a token of log-prob {own:.2f} where another has {best:.2f}: the"
                " sampler is wrong"
            )
    return ""


def _not_best_when_sampled(asker: Asker, greedy: Answer) -> str:
    """Judged by its own log-probs: after a near tie the text is another than the greedy one.

    No seed, and no greedy request beside it: vLLM 0.32 then has FlashInfer draw
    (v1/worker/gpu/sample/sampler.py:304).
    """
    sampled = asker.answer(greedy.prompt_ids, TOKENS, ignore_eos=True, temperature=1, top_k=1)
    return not_greedy(sampled, "sampling with top_k=1")


def mean_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Mean |difference| in nats; NaN where any is NaN."""
    return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / max(1, len(expected))
