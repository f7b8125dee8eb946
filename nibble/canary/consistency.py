"""Scores generated tokens again as a prompt: decode and prefill have to agree.

Works for any model, without recorded data. Sampling with top_k=1 also has to choose the most
probable token.
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
# Mean |difference| of log-probs in nats. Decode and prefill kernels round differently: by 0.02 on
# the CPU in BF16.
MEAN_LIMIT = 0.25
NEAR_TIE = 0.3  # nats between the two most probable tokens; below, rounding decides between them


def check_consistency(asker: Asker, samples: bool = True) -> Finding:
    """Check that generated tokens are the most probable ones, and score them again as a prompt.

    samples: also check tokens that are sampled with top_k=1.
    """
    answer = asker.answer(PROMPT, TOKENS, ignore_eos=True)
    problem = not_greedy(answer) or (_not_best_when_sampled(asker, answer) if samples else "")
    if problem:
        return Finding("consistency", "failed", problem)
    mean = mean_difference(
        answer.logprobs, asker.score([*answer.prompt_ids, *answer.ids])[-len(answer.ids) :]
    )
    detail = f"{len(answer.ids)} generated tokens scored again differ by {mean:.3f} nats on average"
    if not mean <= MEAN_LIMIT:  # also true for NaN
        return Finding("consistency", "failed", f"{detail}, at most {MEAN_LIMIT} is rounding")
    return Finding("consistency", "passed", detail)


def not_greedy(answer: Answer, sampling: str = "temperature 0") -> str:
    """Why a token is not the most probable one; empty if all are.

    `sampling`: the request's sampling parameters in words, for the message.
    """
    for place, (chosen, best) in enumerate(zip(answer.logprobs, answer.best, strict=True)):
        if math.isnan(chosen) or math.isnan(best):
            return f"token {place} has no log-prob: the logits are not finite"
        if best - chosen > NEAR_TIE:
            return (
                f"{sampling} chose a token of log-prob {chosen:.2f} where another has {best:.2f}:"
                " the sampler is wrong"
            )
    return ""


def _not_best_when_sampled(asker: Asker, greedy: Answer) -> str:
    """Why a token that top_k=1 sampled is not the most probable one; empty if all are.

    Uses the log-probs of the sampled answer: after a near tie its text differs from the greedy one.
    The request has no seed and runs alone, because only then vLLM 0.32 samples with FlashInfer
    (v1/worker/gpu/sample/sampler.py:304).
    """
    sampled = asker.answer(greedy.prompt_ids, TOKENS, ignore_eos=True, temperature=1, top_k=1)
    return not_greedy(sampled, "sampling with top_k=1")


def mean_difference(logprobs: Sequence[float], expected: Sequence[float]) -> float:
    """Mean |difference| in nats; NaN if any value is NaN."""
    return sum(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) / max(1, len(expected))
