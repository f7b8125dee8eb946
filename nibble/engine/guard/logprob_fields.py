"""Counts the log-probs of a request: vLLM builds them in one step of its event loop. Pure.

CPU time of that step for 131,072 entries, building and JSON (vllm 0.32, two cores of an AMD EPYC,
2026-11-23): 2.0 to 2.5 s for a chat (one pydantic object for each entry), 0.15 to 0.46 s for a
completion, 0.25 to 0.51 s for a prompt. The default limit of 262,144 allows 65,536 of a chat, and
so about 1 s for each kind.
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
    answers,
    prompts,
    texts,
    whole,
)
from nibble.engine.guard.limits import RequestLimits

CHARS_PER_TOKEN = 3  # an estimate: the text is not tokenized yet
CHAT_WEIGHT = 4
WHOLE_VOCABULARY = 1 << 17
COMPLETION_TOKENS = 16  # vllm 0.32 openai/completion/protocol.py:63, also for null (line 432)
LEAST_ANSWER_TOKENS = 1024  # an answer without `max_tokens` is not cut below
UNKNOWN_CONTEXT = 1 << 31

_ASKING = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
# What limits an answer, the one that vLLM prefers first.
_MAX_TOKENS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    BATCH: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
}


def logprob_problem(
    path: str, body: Body, limits: RequestLimits, context_tokens: int | None
) -> str | None:
    """The reason to refuse the request; None where it may pass."""
    if body.keys().isdisjoint(_ASKING):
        return None
    most, context = limits.max_logprob_entries, context_tokens or UNKNOWN_CONTEXT
    of_prompt, of_answer = _of_prompt(path, body, context), _of_answer(path, body)
    tokens = _answer_tokens(path, body)
    if of_answer and tokens is None:
        tokens = LEAST_ANSWER_TOKENS
    entries = of_prompt + of_answer * min(tokens or 0, context)
    if entries <= most:
        return None
    weighted = "" if path == COMPLETIONS else f", where one of an answer counts {CHAT_WEIGHT}"
    return (
        f"The request asks for up to {entries} log-probs{weighted} (n {answers(body)}, prompts"
        f" {prompts(path, body)}, tokens of an answer {tokens or 0}); expected at most {most}"
        " (NIBBLE_MAX_LOGPROB_ENTRIES). Reduce `logprobs`, `n` or `max_tokens`, or set `stream`."
    )


def answer_limit(
    path: str, body: Body, limits: RequestLimits, context_tokens: int | None
) -> tuple[str, int] | None:
    """The field that limits the answer, and tokens, where the client leaves it open and the context
    allows too many.

    Most answers are far shorter: a refusal would hit all requests for log-probs to a model with a
    long context.
    """
    if body.keys().isdisjoint(_ASKING) or _answer_tokens(path, body) is not None:
        return None
    context = context_tokens or UNKNOWN_CONTEXT
    of_answer = _of_answer(path, body)
    if of_answer == 0:
        return None
    tokens = (limits.max_logprob_entries - _of_prompt(path, body, context)) // of_answer
    return (_MAX_TOKENS[path][0], tokens) if tokens < context else None


def _of_answer(path: str, body: Body) -> int:
    """For each token of the answers; 0 for a stream, which carries them in small pieces."""
    asked = _asked(path, body, "logprobs", "top_logprobs")
    if asked is None or body.get("stream") or path not in _MAX_TOKENS:
        return 0
    weight = 1 if path == COMPLETIONS else CHAT_WEIGHT
    return (asked + 1) * weight * answers(body) * prompts(path, body)


def _of_prompt(path: str, body: Body, context: int) -> int:
    """vLLM repeats them with each answer (vllm 0.32 openai/completion/serving.py:587)."""
    asked = _asked(path, body, "prompt_logprobs")
    if asked is None and body.get("echo"):
        asked = _asked(path, body, "logprobs")
    if asked is None:
        return 0
    return (
        (asked + 1)
        * _prompt_tokens(body.get("prompt", body.get("messages")), context)
        * answers(body)
    )


def _asked(path: str, body: Body, *names: str) -> int | None:
    """The largest number given; None where log-probs are not asked for."""
    given = [body[name] for name in names if body.get(name) is not None and body[name] is not False]
    ids = body.get("logprob_token_ids")
    more = len(ids) if isinstance(ids, list) else 0
    return more + max(_number(path, value) for value in given) if given else None


def _number(path: str, value: Any) -> int:
    if value is True:
        return int(path == COMPLETIONS)  # elsewhere it asks for the chosen token's alone
    number = whole(value)
    return WHOLE_VOCABULARY if number < 0 else number


def _answer_tokens(path: str, body: Body) -> int | None:
    """What the client gives, or vLLM's default for it; None where the context is the limit."""
    given = (body[name] for name in _MAX_TOKENS.get(path, ()) if body.get(name) is not None)
    found = next(given, COMPLETION_TOKENS if path == COMPLETIONS else None)
    return None if found is None else whole(found)


def _prompt_tokens(prompt: Any, context: int) -> int:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    skipped = NO_TEXT_KEYS | MEDIA_KEYS
    return sum(
        (
            len(one)
            if isinstance(one, list)
            else min(context, sum(map(len, texts(one, skipped))) // CHARS_PER_TOKEN)
        )
        for one in (prompt if isinstance(prompt, list) else [prompt])
    )
