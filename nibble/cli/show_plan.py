"""Prints `nibble plan`: every choice, the memory, the speed and the exact command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from nibble.canary.kernels import expectations
from nibble.cli.tables import wide_console
from nibble.errors import NibbleError
from nibble.plan.choice import Choice
from nibble.plan.gather import UNKNOWN_UNTIL_PULL
from nibble.plan.memory import arithmetic, show_gib
from nibble.plan.plan import Plan
from nibble.serve.preflight.machine import check_memory


def show_plan(plan: Plan) -> None:
    """Print tables of choices, flags, environment, memory and speed, then the exact command."""
    console = wide_console()
    for title, choices in (
        ("nibble", plan.choices),
        ("vLLM flags", plan.args),
        ("vLLM environment", plan.env),
    ):
        console.print(_choices_table(title, choices))
    for part in (plan.linear_kernels, plan.e4m3_kernels, plan.expert_kernels):
        if part.shapes:
            from nibble.cli.tune import times_table

            console.print(times_table([shape.to_json() for shape in part.shapes]))
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
    """The sum with every sequence at full length, and how to reduce memory if it does not fit."""
    budget = plan.budget
    if budget.full_kv_bytes is None or budget.weights_bytes is None or budget.room_bytes is None:
        return UNKNOWN_UNTIL_PULL
    text = arithmetic(budget, budget.full_kv_bytes)
    if budget.full_kv_bytes <= budget.room_bytes:
        return text
    return f"{text}; reduce memory, in this order: " + ", ".join(str(step) for step in plan.ladder)


def _gib(value: int | None) -> str:
    """The size, 0 for a negative one: lines below the table name the missing amount."""
    return UNKNOWN_UNTIL_PULL if value is None else show_gib(max(0, value))


def _number(value: float | None) -> str:
    return UNKNOWN_UNTIL_PULL if value is None else f"{max(0.0, value):.1f}"
