"""Counts the contents of a parsed body: answers, prompts, messages and texts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Body = Mapping[str, Any]

CHAT = "/v1/chat/completions"
BATCH = "/v1/chat/completions/batch"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
# On these routes the prompt is a list of messages; vLLM ignores prompt fields of other routes.
_CHATS = frozenset({CHAT, RESPONSES, "/v1/messages", "/v1/messages/count_tokens"})
# Fields with one or more prompts.
_SEQUENCES = frozenset(
    "prompt input inputs texts documents queries data_1 data_2 text_1 text_2 items".split()
)
# Fields that are not text of the prompt: media (in base64 or as a URL), and constraints.
MEDIA_KEYS = frozenset(
    "image_url audio_url video_url input_audio image_embeds audio_embeds image images audio video"
    " videos source file_data data".split()
)
NO_TEXT_KEYS = frozenset(
    {"prompt_embeds", "structured_outputs", "response_format", "kv_transfer_params"}
)


def to_int(value: Any) -> int:
    """The integer that pydantic makes of a field; 0 for a value that vLLM refuses.

    pydantic also accepts "+5", "5.0" and "5_0".
    """
    if not isinstance(value, str | int | float):
        return 0
    try:
        return int(value)
    except (ValueError, OverflowError):
        pass
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return 0


def count_answers(body: Body) -> int:
    """Answers per prompt."""
    return max(1, to_int(body.get("n")), to_int(body.get("best_of")))


def count_prompts(path: str, body: Body) -> int:
    """Prompts of a request on the route `path`."""
    if path in _CHATS:
        return 1
    if path == BATCH:
        return _prompts_in(body.get("messages"))
    return max((_prompts_in(body[name]) for name in _SEQUENCES & body.keys()), default=1)


def _prompts_in(value: Any) -> int:
    """Prompts in a field: a list of token ids is one prompt."""
    if not isinstance(value, list) or not value or isinstance(value[0], int | float):
        return 1
    return len(value)


def count_messages(path: str, body: Body, limit: int) -> int:
    """Messages of a conversation. Each part of a message and each tool call counts as one.

    Stops counting above `limit`.
    """
    names = (
        ("messages", "system", "documents", "input")
        if path == RESPONSES
        else ("messages", "system")
    )
    if path in (CHAT, BATCH):
        names = (*names, "documents")
    waiting = [body[name] for name in names if isinstance(body.get(name), list)]
    total = 0
    while waiting and total <= limit:
        each = waiting.pop()
        inner = each if isinstance(each, list) else _parts(each) if isinstance(each, dict) else ()
        if inner and len(inner) <= limit:
            waiting += inner
        else:
            total += max(1, len(inner))
    return total


def _parts(message: Body) -> list[Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    return [
        *(content if isinstance(content, list) else ()),
        *(calls if isinstance(calls, list) else ()),
    ]


def texts(value: Any, skipped: frozenset[str]) -> Iterator[str]:
    """All strings in `value`, without keys and without the values of the keys `skipped`."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += [inner for key, inner in each.items() if key not in skipped]


def count_chars(value: Any) -> int:
    """Characters of a string or of a list of strings."""
    items: Iterable[Any] = value if isinstance(value, list) else [value]
    return sum(len(text) for text in items if isinstance(text, str))
