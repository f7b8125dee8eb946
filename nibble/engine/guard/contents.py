"""The contents of a parsed body: numbers, answers, prompts, messages and texts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Body = Mapping[str, Any]

CHAT = "/v1/chat/completions"
BATCH = "/v1/chat/completions/batch"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
# Their prompts are messages; vLLM ignores a field with the name of another route's prompts.
_CHATS = frozenset({CHAT, RESPONSES, "/v1/messages", "/v1/messages/count_tokens"})
_SEQUENCES = frozenset(
    {
        "prompt",
        "input",
        "inputs",
        "texts",
        "documents",
        "queries",
        "data_1",
        "data_2",
        "text_1",
        "text_2",
        "items",
    }
)
# Keys of media in base64 or a URL, and of constraints, which do not count as text of the prompt.
MEDIA_KEYS = frozenset(
    {
        "image_url",
        "audio_url",
        "video_url",
        "input_audio",
        "image_embeds",
        "audio_embeds",
        "image",
        "images",
        "audio",
        "video",
        "videos",
        "source",
        "file_data",
        "data",
    }
)
NO_TEXT_KEYS = frozenset(
    {"prompt_embeds", "structured_outputs", "response_format", "kv_transfer_params"}
)


def whole(value: Any) -> int:
    """A number as pydantic gives it to vLLM, which also takes "+5", "5.0" and "5_0"; 0 for what
    vLLM refuses.
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


def answers(body: Body) -> int:
    """Answers to each prompt."""
    return max(1, whole(body.get("n")), whole(body.get("best_of")))


def prompts(path: str, body: Body) -> int:
    """Prompts of the request."""
    if path in _CHATS:
        return 1
    if path == BATCH:
        return _prompts(body.get("messages"))
    return max((_prompts(body[name]) for name in _SEQUENCES & body.keys()), default=1)


def _prompts(value: Any) -> int:
    """How many prompts a field holds: a list of numbers is one."""
    if not isinstance(value, list) or not value or isinstance(value[0], int | float):
        return 1
    return len(value)


def messages(path: str, body: Body, most: int) -> int:
    """Messages of a conversation; one that consists of parts, of tool calls or of a tool's results
    counts each.

    The counting ends above `most`.
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
    while waiting and total <= most:
        one = waiting.pop()
        inner = one if isinstance(one, list) else _parts(one) if isinstance(one, dict) else ()
        if inner and len(inner) <= most:
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
    """All strings in `value` except keys, and except the values of the keys `skipped`."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += [inner for key, inner in one.items() if key not in skipped]


def chars(value: Any) -> int:
    """Characters of a string or of a list of strings."""
    found: Iterable[Any] = value if isinstance(value, list) else [value]
    return sum(len(text) for text in found if isinstance(text, str))
