"""Whole numbers of a request that do not fit in 64 bits. Pure.

vLLM 0.32 checks some fields only from below (openai/chat_completion/protocol.py `stream_interval`,
`top_k`). A larger number reaches msgpack, which holds 64 bits, and the client gets status 500
(v1/serial_utils.py).
"""

from __future__ import annotations

from typing import Any

from nibble.engine.guard.contents import Body, whole

_LEAST, _MOST = -(2**63), 2**63 - 1
_DIGITS = 19  # of _MOST; a shorter text is no larger number
# vLLM compares each number of these with its vocabulary or reads no number in them.
_CHECKED_BY_VLLM = frozenset({"prompt", "input", "messages", "tools", "tokens"})
# pydantic also reads a text as a number in these.
_WHOLE = frozenset(
    {
        "best_of",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "min_tokens",
        "n",
        "priority",
        "seed",
        "stream_interval",
        "top_k",
        "truncate_prompt_tokens",
    }
)


def number_problem(body: Body) -> str | None:
    """The reason to refuse `body`; None where every whole number fits."""
    for name, value in body.items():
        is_text = isinstance(value, str) and name in _WHOLE and len(value) >= _DIGITS
        if is_text and not _LEAST <= whole(value) <= _MOST:
            return _refusal(name)
        if name not in _CHECKED_BY_VLLM and _has_too_large(value):
            return _refusal(name)
    return None


def _has_too_large(value: Any) -> bool:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int | float):
            if not _LEAST <= one <= _MOST:
                return True
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
    return False


def _refusal(name: str) -> str:
    return f"`{name}` contains a number that does not fit in 64 bits."
