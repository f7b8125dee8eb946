"""Reads the words after `nibble serve` or `nibble plan`: model, nibble's options, vLLM's flags.

One grammar covers both kinds of flags: `options.options()` declares nibble's, the schema of the
pinned vLLM declares the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.engine.flags import COMMAND_LINE, Flags, read_flags
from nibble.engine.schema import Schema
from nibble.errors import ExitCode, NibbleError
from nibble.settings.declare import Option
from nibble.settings.options import Settings, options


@dataclass(frozen=True)
class CommandLine:
    """Parsed words: `values` of Settings, `flags` of vLLM, and `rest`, the verb's switches."""

    values: Mapping[str, Any]
    flags: Flags
    rest: frozenset[str]


def read_command_line(
    words: Sequence[str], own_switches: Sequence[str], schema: Schema
) -> CommandLine:
    """Split `words`. `own_switches` belong to the verb (`--json`); words after `--` go to vLLM
    unchanged.
    """
    by_flag = {option.flag: (name, option) for name, option in options().items() if option.flag}
    values: dict[str, Any] = {}
    for_vllm: list[str] = []
    position = 0
    while position < len(words) and words[position] in own_switches:  # `serve --detach MODEL`
        position += 1
    rest = set(words[:position])
    if position < len(words) and not words[position].startswith("-"):
        values["model"], position = words[position], position + 1
    while position < len(words):
        name, equals, inline = words[position].partition("=")
        canonical = _canonical(name, schema, by_flag)
        if words[position] == "--":
            for_vllm += words[position + 1 :]
            break
        if name in own_switches and not equals:
            rest.add(name)
            position += 1
        elif canonical in by_flag:
            field, option = by_flag[canonical]
            value, position = _own_value(
                option, field, inline if equals else None, words, position + 1
            )
            values[field] = value
        else:
            taken = _vllm_words(words, position)
            for_vllm += taken
            position += len(taken)
    return CommandLine(values, read_flags(for_vllm, COMMAND_LINE, schema), frozenset(rest))


def _canonical(name: str, schema: Schema, by_flag: Mapping[str, Any]) -> str:
    """nibble's spelling of a flag: vLLM's `-tp` and `--max_model_len` name options of nibble."""
    dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    if dashed in by_flag:
        return dashed
    spec = schema.flag(name) if name.startswith("-") and name != "-" else None
    return spec.name if spec is not None and spec.name in by_flag else dashed


def _own_value(
    option: Option, field: str, inline: str | None, words: Sequence[str], position: int
) -> tuple[Any, int]:
    if inline is not None:
        return inline, position
    if Settings.model_fields[field].annotation is bool:
        return "1", position
    if option.bare is not None:
        follows = words[position] if position < len(words) else ""
        return (
            (follows, position + 1)
            if follows.startswith(option.bare.split("_")[0])
            else (option.bare, position)
        )
    if position >= len(words):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{option.flag} has no value",
            expected=option.expected,
            action=f"write {option.flag} VALUE",
        )
    return words[position], position + 1


def _vllm_words(words: Sequence[str], start: int) -> list[str]:
    """The flag at `start` and the words after it that are not flags themselves."""
    end = start + 1
    while end < len(words) and not words[end].startswith("--") and not _is_short_flag(words[end]):
        end += 1
    return list(words[start:end])


def _is_short_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()
