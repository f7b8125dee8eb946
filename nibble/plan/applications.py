"""What applications need beyond text: calls of tools, and JSON that ends. Pure.

vLLM 0.32 answers 400 to `tools` without a parser (renderers/online_renderer.py:264).
"""

from __future__ import annotations

from collections.abc import Mapping

from nibble.engine.contract import CONFIG_FLAG, CONFIG_KEY
from nibble.plan.choice import OURS, Choice, Choices, Flags

PARSER, AUTOMATIC = "--tool-call-parser", "--enable-auto-tool-choice"
# A parser, and what a chat template tells the model in its form of calls alone.
_FORMS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "<args-json-object>"),  # Qwen2.5, Qwen3, Hermes
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),  # Qwen3-Coder, Qwen3.5
    "llama3_json": ('"parameters": dictionary of argument name and its value',),  # Llama 3.1 on
    "mistral": ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
}
# Flags with which the folder's template, or its tokenizer, is not the one that renders.
_OTHERS = ("--chat-template", "--tokenizer", "--tokenizer-mode")
_STRUCTURED, _NO_BLANKS = "--structured-outputs-config", "disable_any_whitespace"


def tool_parser_of(template: str) -> str | None:
    """The parser of the calls that a chat template asks for; None for an unknown form or none."""
    if "tools" not in template:
        return None
    found = [parser for parser, marks in _FORMS.items() if all(mark in template for mark in marks)]
    return found[0] if len(found) == 1 else None


def tool_flags(template: str, flags: Flags) -> Choices:
    """A parser for calls of tools, where the template says how they look and no layer sets one."""
    if any(name in flags for name in (PARSER, AUTOMATIC, *_OTHERS)):
        return {}
    parser = tool_parser_of(template)
    if parser is None:
        return {}
    return {
        AUTOMATIC: Choice(True, OURS, "the chat template has tools"),
        PARSER: Choice(parser, OURS, "the form of the calls in the chat template"),
    }


def compact_json_flags(flags: Flags) -> Choices:
    """Give way where a layer above says with vLLM's own flag whether JSON has blanks."""
    ours = flags.origin(CONFIG_FLAG, CONFIG_KEY, "compact_json")
    theirs = flags.origin(_STRUCTURED, _NO_BLANKS)
    if ours is None or theirs is None or theirs.layer <= ours.layer:
        return {}
    value = {CONFIG_KEY: {"compact_json": "off"}}
    reason = f"{_STRUCTURED} decides ({theirs.source})"
    return {CONFIG_FLAG: Choice(value, theirs.source, reason, theirs.layer)}
