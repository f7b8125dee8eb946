"""Flags of `vllm serve` as values: read from words, joined layer by layer, written back as words.

A flag set maps the canonical long name (`--max-model-len`) to True, False (written `--no-…`), a
string, a number, a list, or a dict for JSON-valued flags. Dotted flags (`--compilation-config.mode
3`) are read into the dict they set.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nibble.engine.schema import FlagSpec, Schema
from nibble.errors import ExitCode, NibbleError

COMMAND_LINE = "the command line"

# Flags that nibble sets, with the variable that users set instead.
OWNED: Mapping[str, str] = {
    "--host": "HOST",
    "--port": "PORT",
    "--uds": "HOST and PORT",
    "--api-key": "NIBBLE_API_KEY or NIBBLE_API_KEY_FILE",
    "--middleware": "none: nibble's gate is the only middleware",
    "--shutdown-timeout": "NIBBLE_DRAIN_SECONDS",
    "--kv-cache-memory-bytes": "NIBBLE_KV_CACHE_BYTES",
    "--served-model-name": "NIBBLE_SERVED_MODEL_NAME",
    "--model": "MODEL",
    "--revision": "NIBBLE_REVISION",
    "--config": "NIBBLE_CONFIG (nibble's own TOML)",
    "--hf-token": "HF_TOKEN or HF_TOKEN_FILE",
    "--root-path": "none: the gate compares paths with vLLM's own",
}

# Backends of other projects that vLLM and nibble do not have.
MISSING_BACKENDS: Mapping[str, str] = {
    "CUTE_PAGED": "vLLM has no CuTe paged attention; nibble's is NIBBLE_ATTENTION=nibble",
}

Flags = dict[str, Any]


def split_words(text: str, source: str) -> list[str]:
    """Words of `text` as a POSIX shell splits them; JSON in single quotes survives with its
    spaces.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        what = f"{source} cannot be split into words: {str(error).lower()}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="balanced quotes",
            action=f"quote JSON in {source} with '…'",
        ) from None


def read_flags(words: Sequence[str], source: str, schema: Schema) -> Flags:
    """Flags of `vllm serve` in `words`. CONFIG for a flag vLLM does not have, a bad value, or
    one nibble owns.
    """
    flags: Flags = {}
    position = 0
    while position < len(words):
        name, spec, inline, position = _next_flag(words, position, source, schema)
        path = name.split(".")[1:]
        value, position = _value(name, spec, inline, words, position, source)
        if path:
            value = _nested(path, value)
        flags = (
            merge(flags, {spec.name: value})
            if isinstance(value, dict)
            else flags | {spec.name: value}
        )
    check_flags(flags, source, schema)
    return flags


def _next_flag(
    words: Sequence[str], position: int, source: str, schema: Schema
) -> tuple[str, FlagSpec, str | None, int]:
    """The flag at `position`: as written (normalised), its spec, the part after `=`, and the
    next position.
    """
    word = words[position]
    if not word.startswith("-") or word in ("-", "--"):
        what = f"{source} has {word!r} where a flag belongs"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="flags of `vllm serve`, such as --kv-cache-dtype fp8",
            action=(
                "write MODEL, once, before the flags"
                if source == COMMAND_LINE
                else "check the quotes around it"
            ),
        )
    written, equals, inline = word.partition("=")
    name = "--" + written[2:].replace("_", "-") if written.startswith("--") else written
    head = name.split(".")[0]
    if "." in name:  # the keys of a nested config keep their underscores
        name = head + written[len(head) :]
    spec = schema.flag(head)
    short = re.fullmatch(r"(-[A-Za-z]+)(\d+)", written)  # -O3, -tp2
    if spec is None and short and (spec := schema.flag(short[1])) is not None:
        return spec.name, spec, short[2], position + 1
    if spec is None:
        hint = schema.suggest(head)
        action = f"did you mean {hint}?" if hint else "see `vllm serve --help=all`"
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{source} has {written}, which vLLM {schema.version} does not know",
            expected="",
            action=action,
        )
    if spec.kind == "bool" and head == "--no-" + spec.name[2:]:
        return spec.name, spec, "false", position + 1
    return name if "." in name else spec.name, spec, inline if equals else None, position + 1


def _value(
    name: str, spec: FlagSpec, inline: str | None, words: Sequence[str], position: int, source: str
) -> tuple[Any, int]:
    """The value of a flag and the position after it."""
    nested = "." in name
    if spec.kind == "bool" and not nested:
        if inline is None:
            return True, position
        return inline.strip().lower() in ("1", "true", "yes", "on"), position
    if inline is not None:
        return _typed(inline, spec, name, source, nested), position
    end = position
    while (
        end < len(words)
        and not _looks_like_flag(words[end])
        and (end == position or spec.kind == "list")
    ):
        end += 1
    taken = list(words[position:end])
    if not taken:
        if nested:  # `--compilation-config.pass_config.fuse` alone is true in vLLM's parser
            return True, position
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{source} has {name} without a value",
            expected="a value after it",
            action=f"write {name} VALUE",
        )
    if spec.kind == "list" and not nested:
        return taken, end
    return _typed(taken[0], spec, name, source, nested), end


def _looks_like_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d*)?", word)


def _typed(text: str, spec: FlagSpec, name: str, source: str, nested: bool) -> Any:
    """JSON where it is JSON, else the text itself (vLLM converts numbers; what it refuses,
    `check_flags` finds).
    """
    if nested:
        try:
            return json.loads(text)
        except ValueError:
            return text
    if text.lstrip().startswith(("{", "[")) or (
        spec.kind == "json" and not spec.accepts_plain_text
    ):
        try:
            return json.loads(text)
        except ValueError as error:
            what = f"the value of {name} in {source} is not valid JSON ({error})"
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected='JSON such as {"key": "value"}',
                action=f"put it in single quotes: {name} '…'",
            ) from None
    return [text] if spec.kind == "list" else text


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def check_flags(flags: Mapping[str, Any], source: str, schema: Schema) -> None:
    """Refuse owned flags, values outside a flag's choices and keys a nested config does not
    have.
    """
    for name, value in flags.items():
        if missing := MISSING_BACKENDS.get(str(value)):
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{name} {value} in {source}: {missing}",
                expected="",
                action="choose another backend",
            )
        if name in OWNED:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{name} in {source} is a flag that nibble sets",
                expected="",
                action=f"use {OWNED[name]} instead",
            )
        problems = (
            schema.check_json(name, value)
            if isinstance(value, dict)
            else [schema.check_value(name, value)]
        )
        for problem in filter(None, problems):
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{source}: {problem}",
                expected="",
                action=f"correct or drop {name}",
            )


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`; objects are joined key by key, at every depth."""
    joined = dict(low)
    for key, value in high.items():
        below = joined.get(key)
        joined[key] = (
            merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return joined


def write_flag(name: str, value: Any) -> list[str]:
    """A flag as words for `vllm serve`."""
    if value is True:
        return [name]
    if value is False:
        return ["--no-" + name.removeprefix("--")]
    if isinstance(value, Mapping):
        return [name, json.dumps(value, separators=(",", ":"))]
    if isinstance(value, (list, tuple)):
        return [
            name,
            *(json.dumps(item) if isinstance(item, Mapping) else str(item) for item in value),
        ]
    return [name, str(value)]
