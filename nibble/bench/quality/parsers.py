"""Scripted answers through vLLM's tool parsers, in a process that imports vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nibble.bench.about import clean_environ
from nibble.bench.quality.outcome import Outcome
from nibble.bench.quality.scripts import (
    FORMS,
    PLAIN,
    SCRIPTS,
    TOKENS,
    TOOLS,
    Script,
    answer_of,
)  # fmt: skip
from nibble.errors import ExitCode, NibbleError

_LIMIT_S = 300.0
_WAYS = {"whole": "whole", "1": "a token at a time", "5": "five tokens at a time"}


def named_in_recipes(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tool parsers that recipes (their `args`) name, sorted. Pure."""
    return sorted({str(one["tool-call-parser"]) for one in recipes if "tool-call-parser" in one})


def run_scripts(parsers: Sequence[str], environ: Mapping[str, str]) -> list[Outcome]:
    """Every script of every parser, whole and streamed. Raises USAGE for a parser without
    scripts.
    """
    unknown = [name for name in parsers if name not in FORMS]
    if unknown:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"no scripted answers are known for {', '.join(unknown)}",
            expected=", ".join(FORMS),
            action="correct --parsers",
        )
    order = [(parser, name) for parser in parsers for name in SCRIPTS]
    cases = [{"parser": parser, "text": answer_of(parser, SCRIPTS[name])} for parser, name in order]
    found = _ask({"tokens": TOKENS, "tools": TOOLS, "cases": cases}, environ)
    return [
        Outcome(f"{parser}: {name}, {_WAYS[way]}", *judge(SCRIPTS[name], answer))
        for (parser, name), answers in zip(order, found, strict=True)
        for way, answer in answers.items()
    ]


def judge(script: Script, answer: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a parser found the script's calls, and what it found instead. Pure."""
    if "error" in answer:
        return False, str(answer["error"])
    calls = []
    for name, text in answer["calls"]:
        try:
            calls.append((name, json.loads(text)))
        except ValueError:
            return False, f"arguments of {name} are not JSON: {text!r}"
    wanted = [(call.name, dict(call.arguments)) for call in script]
    if calls != wanted:
        return False, f"found {calls}, expected {wanted}"
    content = answer["content"].strip()
    if content != ("" if script else PLAIN):
        return False, f"the text beside the calls is {content!r}"
    return True, ""


def _ask(job: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    found = subprocess.run(
        [sys.executable, "-m", "nibble.engine.parse_answers"],
        input=json.dumps(job), capture_output=True, text=True, timeout=_LIMIT_S,
        env=clean_environ(environ), check=False,
    )  # fmt: skip
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise NibbleError(
            ExitCode.INTERNAL,
            what=f"vLLM's parsers could not be run: {last[:300]}",
            action="install the vLLM that this nibble pins",
        )
    return json.loads(found.stdout)
