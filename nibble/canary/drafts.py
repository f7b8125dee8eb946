"""Speculative decoding: checks how many drafts the model accepts and that the text is unchanged."""

from __future__ import annotations

from nibble.canary.client import Asker
from nibble.canary.consistency import MEAN_LIMIT, PROMPT, mean_difference, not_greedy
from nibble.canary.finding import Finding, NotCompared

TOKENS = 64
ENOUGH = 16  # drafted tokens; of so many, a model accepts some from a working draft model
_COUNTERS = {
    name: f"vllm:spec_decode_num_{name}_total" for name in ("draft_tokens", "accepted_tokens")
}


def check_drafts(asker: Asker, floor: float | None) -> Finding:
    """Generate with drafts and score the tokens again without.

    floor: the recipe's min_acceptance, the share of drafted tokens that the model has to accept.
    None: a draft model without any accepted token is a warning.
    """
    before = counters(asker)
    answer = asker.answer(PROMPT, TOKENS, ignore_eos=True)
    after = counters(asker)
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    scored = asker.score([*answer.prompt_ids, *answer.ids])[-len(answer.ids) :]
    mean = mean_difference(answer.logprobs, scored)
    detail = (
        f"{accepted:.0f} of {drafted:.0f} drafted tokens accepted, {mean:.3f} nats from a scoring"
        " without drafts"
    )
    if (problem := not_greedy(answer)) or not mean <= MEAN_LIMIT:
        why = f"; {problem}" if problem else f", at most {MEAN_LIMIT} is rounding"
        return Finding("drafts", "failed", f"{detail}{why}")
    if drafted < ENOUGH:
        return Finding("drafts", "not compared", f"only {drafted:.0f} tokens were drafted")
    if floor is not None and accepted < floor * drafted:
        return Finding("drafts", "failed", f"{detail}; the recipe expects {floor:.0%} at least")
    warning = "the model accepts no draft, so that drafts only cost time" if not accepted else ""
    return Finding("drafts", "passed", detail, warning)


def counters(asker: Asker) -> dict[str, float]:
    """Drafted and accepted tokens of all engines since the start. Raises NotCompared."""
    from nibble.engine.metrics import totals

    values = totals(asker.metrics(), _COUNTERS.values())
    if len(values) < len(_COUNTERS):
        raise NotCompared("/metrics has no counters of drafted tokens")
    return {name: values[metric] for name, metric in _COUNTERS.items()}
