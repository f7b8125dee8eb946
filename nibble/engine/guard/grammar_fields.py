"""Selects the fields of a request from which vLLM makes a grammar, by route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHAT = "/v1/chat/completions"
BATCH = "/v1/chat/completions/batch"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
ANTHROPIC = (MESSAGES, COUNT_TOKENS)

# vLLM 0.32 makes a grammar of these (structured_outputs_from_response_format,
# extract_structured_outputs of each protocol.py, _apply_structural_tag of
# parser/abstract_parser.py, _handle_output_config of anthropic/serving.py). It ignores the guided_*
# fields of earlier versions with a warning (serve/engine/protocol.py:25).
_MAKES_A_GRAMMAR: dict[str, tuple[str, ...]] = {
    CHAT: ("structured_outputs", "response_format", "tools"),
    BATCH: ("structured_outputs", "response_format", "tools"),
    COMPLETIONS: ("structured_outputs", "response_format"),
    RESPONSES: ("structured_outputs", "text", "tools"),
    MESSAGES: ("tools", "output_config"),
    COUNT_TOKENS: ("tools", "output_config"),  # read by the tool parser, though never compiled
}
# Other fields that determine the grammar or when it ends.
_SHAPES_IT = (
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
    "include_reasoning",
    "reasoning",
    "thinking",
    "stop_token_ids",
    "ignore_eos",
)
_PLAIN_TEXT = {"type": "text"}


def grammar_fields(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of `body` that determine its grammar; None if vLLM does not compile one."""
    names = _MAKES_A_GRAMMAR.get(path)
    if names is None:
        return None
    fields = {name: body[name] for name in names if body.get(name) is not None}
    if path in ANTHROPIC and (changes := _tool_changes(body)):
        fields["messages"] = changes
    if fields.get("response_format") == _PLAIN_TEXT:
        del fields["response_format"]
    if not fields:
        return None
    return fields | {name: body[name] for name in _SHAPES_IT if body.get(name) is not None}


def _tool_changes(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages that add or remove tools, without other content (vllm 0.32
    anthropic/serving.py:717).
    """
    changed = []
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        blocks = [
            block
            for block in content
            if isinstance(block, dict) and block.get("type") in ("tool_addition", "tool_removal")
        ]
        if blocks:
            changed.append({**message, "content": blocks})
    return changed
