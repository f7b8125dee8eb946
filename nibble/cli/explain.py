"""`nibble plan MODEL --explain FLAG`: every layer that sets a flag or variable, and which wins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from nibble.cli.common import print_json
from nibble.cli.tables import plain_table, wide_console
from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import Choice, Layer
from nibble.plan.plan import Plan
from nibble.plan.server import OPTIONS as SERVER_OPTIONS
from nibble.settings.declare import closest
from nibble.settings.options import options

WORD = "--explain"
LAYERS = {
    Layer.VLLM: "vLLM",
    Layer.NIBBLE: "nibble",
    Layer.TARGET: "target",
    Layer.RECIPE: "recipe",
    Layer.RULE: "known risk",
    Layer.FILE: "user TOML",
    Layer.ENVIRONMENT: "environment",
    Layer.EXTRA_ARGS: "VLLM_EXTRA_ARGS",
    Layer.COMMAND_LINE: "command line",
    Layer.LIMIT: "limit",
}


def split_words(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without `--explain NAME`, and the name."""
    for_vllm = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:for_vllm]):
        name, equals, inline = word.partition("=")
        if name != WORD:
            continue
        after = place + 1 if equals else place + 2
        found = inline if equals else next(iter(words[place + 1 : for_vllm]), "")
        if not found:
            raise NibbleError(
                ExitCode.USAGE,
                what=f"{WORD} has no name",
                expected="a flag or a variable",
                action=f"write {WORD} --max-num-seqs",
            )
        return [*words[:place], *words[after:]], found
    return list(words), None


def explain(plan: Plan, name: str, as_json: bool) -> None:
    """Print the history of a flag or variable. Raises USAGE for an unknown name."""
    shown, rows = history(plan, name)
    if as_json:
        print_json({"name": shown, "history": rows})
        return
    console = wide_console()
    if not rows:
        console.print(f"No layer sets {shown}; vLLM decides")
        return
    chosen = (plan.args if shown.startswith("--") else plan.env).get(shown)
    value = "vLLM's default" if chosen is None else chosen.to_json()["value"]
    console.print(escape(f"{shown} is {_text(value)}"))
    table = plain_table("layer", "value", "source", "outcome", "reason")
    for row in rows:
        cells = (row["layer"], _text(row["value"]), row["source"], row["outcome"], row["reason"])
        table.add_row(*map(escape, cells))
    console.print(table)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def history(plan: Plan, name: str) -> tuple[str, list[dict[str, Any]]]:
    """The canonical name, and a row for each layer that sets it, the winning one first."""
    flag = _canonical(plan, name)
    flags = plan.args if flag.startswith("--") else plan.env
    rows = [_row(LAYERS[choice.layer], choice, outcome) for choice, outcome in flags.history(flag)]
    spec = load_schema().flag(flag) if flag.startswith("--") else None
    if spec is not None and spec.default is not None:
        outcome = "overruled" if rows else "wins"
        rows.append(_row(LAYERS[Layer.VLLM], Choice(spec.default, "vLLM's default"), outcome))
    return flag, rows


def _row(layer: str, choice: Choice, outcome: str) -> dict[str, Any]:
    return {"layer": layer, **choice.to_json(), "outcome": outcome}


def _canonical(plan: Plan, name: str) -> str:
    """vLLM's flag or the variable that `name` stands for."""
    if name.islower() and not name.startswith("-"):
        name = "--" + name.replace("_", "-")
    for field, option in options().items():
        flag = option.vllm or SERVER_OPTIONS.get(field)
        if flag and name in (option.flag, flag, *option.env):
            return flag
    if not name.startswith("-"):
        if name in plan.env:
            return name
        raise _unknown(name, [*plan.env, *(one for o in options().values() for one in o.env)])
    spec = load_schema().flag(name)
    if spec is None:
        raise _unknown(name, [one.name for one in load_schema().flags()])
    return spec.name


def _unknown(name: str, known: list[str]) -> NibbleError:
    return NibbleError(
        ExitCode.USAGE,
        what=f"{name} is neither a flag of `vllm serve` nor a variable of this plan",
        expected="one of them",
        action=closest(name, known),
    )
