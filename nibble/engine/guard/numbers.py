"""Refuses numbers that do not fit in 64 bits. Pure.

vLLM 0.32 has only a lower limit for some fields (openai/chat_completion/protocol.py
`stream_interval`, `top_k`). A larger number reaches msgpack, which is limited to 64 bits
(v1/serial_utils.py), and the client gets status 500.
"""

from __future__ import annotations

from typing import Any

from nibble.engine.guard.contents import Body, to_int

_LEAST, _MOST = -(2**63), 2**63 - 1
_DIGITS = 19  # of _MOST; a string with fewer characters cannot be a larger number
# In these fields vLLM compares numbers with its vocabulary, or does not use numbers.
_CHECKED_BY_VLLM = frozenset({"prompt", "input", "messages", "tools", "tokens"})
# In these fields pydantic also accepts a string as a number.
_INTEGERS = frozenset(
    "best_of max_completion_tokens max_output_tokens max_tokens min_tokens n priority seed"
    " stream_interval top_k truncate_prompt_tokens".split()
)


def number_problem(body: Body) -> str | None:
    """The reason to refuse `body`, or None if every number fits."""
    for name, value in body.items():
        is_string = isinstance(value, str) and name in _INTEGERS and len(value) >= _DIGITS
        if is_string and not _LEAST <= to_int(value) <= _MOST:
            return _refusal(name)
        if name not in _CHECKED_BY_VLLM and _has_too_large(value):
            return _refusal(name)
    return None


def _has_too_large(value: Any) -> bool:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, int | float):
            if not _LEAST <= each <= _MOST:
                return True
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
    return False


def _refusal(name: str) -> str:
    return f"`{name}` contains a number that does not fit in 64 bits."
