"""Limits the log-probs of a request, which vLLM builds in one step of its event loop. Pure.

CPU time of that step for 131,072 entries, including JSON (vllm 0.32, two cores of an AMD EPYC,
2026-11-23): 2.0 to 2.5 s for a chat (one pydantic object per entry), 0.15 to 0.46 s for a
completion, 0.25 to 0.51 s for a prompt. An entry of a chat therefore counts CHAT_WEIGHT. The
default limit of 262,144 allows 65,536 entries of a chat, which take about 1 s.
"""

from __future__ import annotations

from typing import Any

from nibble.engine.guard.contents import (
    BATCH,
    CHAT,
    COMPLETIONS,
    MEDIA_KEYS,
    NO_TEXT_KEYS,
    RESPONSES,
    Body,
    count_answers,
    count_prompts,
    texts,
    to_int,
)
from nibble.engine.guard.limits import RequestLimits

CHARS_PER_TOKEN = 3  # an estimate for text that is not tokenized yet
CHAT_WEIGHT = 4
WHOLE_VOCABULARY = 1 << 17  # tokens, for a negative number, which asks for all
COMPLETION_TOKENS = 16  # vllm 0.32 openai/completion/protocol.py:63, also for null (line 432)
LEAST_ANSWER_TOKENS = 1024  # the smallest limit for an answer without `max_tokens`
UNKNOWN_CONTEXT = 1 << 31

_REQUESTS_LOGPROBS = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
# Fields that limit the answer; vLLM uses the first that is set.
_MAX_TOKENS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    BATCH: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
}


def logprob_problem(
    path: str, body: Body, limits: RequestLimits, context_tokens: int | None
) -> str | None:
    """The reason to refuse the request, or None."""
    if body.keys().isdisjoint(_REQUESTS_LOGPROBS):
        return None
    limit, context = limits.max_logprob_entries, context_tokens or UNKNOWN_CONTEXT
    per_token = _entries_per_answer_token(path, body)
    tokens = _answer_tokens(path, body)
    if per_token and tokens is None:
        tokens = LEAST_ANSWER_TOKENS
    entries = _prompt_entries(path, body, context) + per_token * min(tokens or 0, context)
    if entries <= limit:
        return None
    weighted = "" if path == COMPLETIONS else f", where one of an answer counts {CHAT_WEIGHT}"
    return (
        f"The request asks for up to {entries} log-probs{weighted} (n {count_answers(body)},"
        f" prompts {count_prompts(path, body)}, tokens of an answer {tokens or 0}); expected at"
        f" most {limit} (NIBBLE_MAX_LOGPROB_ENTRIES). Reduce `logprobs`, `n` or `max_tokens`, or"
        " set `stream`."
    )


def answer_limit(
    path: str, body: Body, limits: RequestLimits, context_tokens: int | None
) -> tuple[str, int] | None:
    """The field and the number of tokens to set, if the client sets no limit for the answer.

    None if an answer that fills the context stays within the limit. A refusal instead would affect
    every request for log-probs to a model with a long context, though most answers are short.
    """
    if body.keys().isdisjoint(_REQUESTS_LOGPROBS) or _answer_tokens(path, body) is not None:
        return None
    context = context_tokens or UNKNOWN_CONTEXT
    per_token = _entries_per_answer_token(path, body)
    if per_token == 0:
        return None
    tokens = (limits.max_logprob_entries - _prompt_entries(path, body, context)) // per_token
    return (_MAX_TOKENS[path][0], tokens) if tokens < context else None


def _entries_per_answer_token(path: str, body: Body) -> int:
    """Weighted entries for each token of the answers; 0 for a stream, which sends small pieces."""
    number = _requested(path, body, "logprobs", "top_logprobs")
    if number is None or body.get("stream") or path not in _MAX_TOKENS:
        return 0
    weight = 1 if path == COMPLETIONS else CHAT_WEIGHT
    return (number + 1) * weight * count_answers(body) * count_prompts(path, body)


def _prompt_entries(path: str, body: Body, context: int) -> int:
    """Entries for the prompts, which vLLM repeats with each answer (vllm 0.32
    openai/completion/serving.py:587).
    """
    number = _requested(path, body, "prompt_logprobs")
    if number is None and body.get("echo"):
        number = _requested(path, body, "logprobs")
    if number is None:
        return 0
    tokens = _prompt_tokens(body.get("prompt", body.get("messages")), context)
    return (number + 1) * tokens * count_answers(body)


def _requested(path: str, body: Body, *names: str) -> int | None:
    """The largest number of log-probs per token in the fields `names`; None without any."""
    set_values = [
        body[name] for name in names if body.get(name) is not None and body[name] is not False
    ]
    ids = body.get("logprob_token_ids")
    more = len(ids) if isinstance(ids, list) else 0
    return more + max(_number(path, value) for value in set_values) if set_values else None


def _number(path: str, value: Any) -> int:
    if value is True:
        return int(path == COMPLETIONS)  # on other routes: only the chosen token's log-prob
    number = to_int(value)
    return WHOLE_VOCABULARY if number < 0 else number


def _answer_tokens(path: str, body: Body) -> int | None:
    """The client's limit or vLLM's default for it; None if only the context limits the answer."""
    limits = (body[name] for name in _MAX_TOKENS.get(path, ()) if body.get(name) is not None)
    limit = next(limits, COMPLETION_TOKENS if path == COMPLETIONS else None)
    return None if limit is None else to_int(limit)


def _prompt_tokens(prompt: Any, context: int) -> int:
    """Tokens of the prompts: counted if they are token ids, else estimated from the text."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    skipped = NO_TEXT_KEYS | MEDIA_KEYS
    total = 0
    for each in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(each, list):
            total += len(each)
        else:
            total += min(context, sum(map(len, texts(each, skipped))) // CHARS_PER_TOKEN)
    return total
