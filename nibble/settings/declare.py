"""Declares an option: a field with its names, help and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Option:
    """An option's name, help and limits for every place that shows them; the field has type and
    default.

    `vllm` is the flag of `vllm serve` that gets the value. `expected` completes the sentence
    "expected …" of an error. `bare` is the value of a flag without a value.
    """

    group: str
    help: str
    env: tuple[str, ...] = ()
    flag: str | None = None
    vllm: str | None = None
    expected: str = ""
    secret: bool = False
    bare: str | None = None


def option(
    default: Any,
    group: str,
    help: str,
    env: str | tuple[str, ...] = (),
    *,
    flag: str | None = None,
    vllm: str | None = None,
    expected: str = "",
    secret: bool = False,
    bare: str | None = None,
    **limits: Any,
) -> Any:
    names = (env,) if isinstance(env, str) else env
    option = Option(group, help, names, flag, vllm, expected, secret, bare)
    return Field(default, json_schema_extra={"option": option}, **limits)  # type: ignore[dict-item]


def option_of(field: FieldInfo) -> Option:
    """The declaration behind a field of Settings."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    option = extra["option"]
    assert isinstance(option, Option)
    return option


def token_count(value: Any) -> int | None:
    """A number of tokens written as 32768 or 32K; None for anything else.

    The suffixes are those of vLLM's flag: k = 1000, K = 1024 (vllm 0.32 argparse_utils.py:29).
    """
    match = re.fullmatch(r"(\d+)([kKmM]?)", str(value).strip())
    if match is None:
        return None
    return int(match[1]) * {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}[match[2]]


def closest(name: str, known: list[str]) -> str:
    """An action that names the nearest known spelling, or where the list is."""
    import difflib

    match = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {match[0]}?" if match else "see `nibble serve --help`"
