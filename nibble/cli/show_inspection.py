"""Prints an inspection on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nibble.checkpoint.missing import some_of
from nibble.cli.inspection import Inspection
from nibble.machine.disk import gib

MAX_ROWS = 12


def show_inspection(found: Inspection) -> None:
    """Facts, inventory, fused layers, what vLLM alone gets wrong, verdict."""
    console = Console(highlight=False)
    console.print(_facts(found))
    if found.inventory:
        console.print(_inventory(found))
    for line in found.vllm_alone:
        console.print(f"[yellow]vLLM alone[/] {escape(line)}", soft_wrap=True)
    if missing := found.checkpoint.missing:
        console.print(
            f"[yellow]missing[/] {len(missing)}, probably: {escape(some_of(missing))}",
            soft_wrap=True,
        )
    for doubt in found.doubts:
        console.print(f"[yellow]unlikely:[/] {escape(doubt)}", soft_wrap=True)
    for note in found.checkpoint.scheme.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    colour = "red" if found.refusal else "yellow" if missing or found.doubts else "green"
    console.print(f"[bold {colour}]{escape(found.verdict)}[/]", soft_wrap=True)


def _facts(found: Inspection) -> Table:
    checkpoint, scheme = found.checkpoint, found.checkpoint.scheme
    weights = checkpoint.weights
    activations = f", activations {scheme.activations}" if scheme.is_nvfp4 else ""
    size = (
        f"{gib(weights.total_bytes)}, {_count(weights.parameters)} parameters"
        if weights
        else "weights not seen"
    )
    rows = (
        ("model", f"{checkpoint.id}  {checkpoint.architecture or checkpoint.model_type or ''}"),
        ("scheme", f"{scheme.name}{activations}{f' ({scheme.detail})' if scheme.detail else ''}"),
        ("producer", found.producer or "-"),
        ("size", size),
        ("KV cache", f"{scheme.kv_cache or 'not declared'}, {found.kv_scales} scales"),
        ("output head", found.lm_head),
        ("draft (MTP)", found.draft),
        ("excluded", _excluded(found)),
        ("fused layers", _merges(found)),
        ("scale layout", _layout(found)),
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(name, escape(text))
    return table


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.1f} M"


def _excluded(found: Inspection) -> str:
    """The list of unquantized layers compared with the tensors."""
    if found.checkpoint.modules is None:
        return ""
    entries = (
        f"{len(found.excluded)} entries"
        if len(found.excluded) > 3
        else ", ".join(found.excluded) or "nothing"
    )
    if not found.wrong_modules:
        return f"{entries}; agrees with the tensors"
    return f"{entries}; wrong about {_some(found.wrong_modules)}, which nibble corrects"


def _merges(found: Inspection) -> str:
    if not found.groups:
        return ""
    parts = []
    for is_expert, name in ((False, "dense"), (True, "expert")):
        counted = Counter(group.quality for group in found.groups if group.is_expert is is_expert)
        if counted:
            parts.append(
                f"{counted.total()} {name}: "
                + ", ".join(f"{n} {q}" for q, n in counted.most_common())
            )
    return "; ".join(parts)


def _layout(found: Inspection) -> str:
    if found.layout is None or not found.layout.tensors:
        return ""
    layout = found.layout
    undecided = layout.tensors - layout.right - layout.wrong
    return (
        f"{layout.right} of {layout.tensors} weights match their label, {layout.wrong} do not,"
        f" {undecided}"
        " undecided"
    )


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def _inventory(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("part", "type", "tensors", "bytes"):
        table.add_column(heading, justify="right" if heading in ("tensors", "bytes") else "left")
    for row in found.inventory[:MAX_ROWS]:
        table.add_row(row["kind"], row["dtype"], str(row["tensors"]), gib(row["bytes"]))
    if rest := found.inventory[MAX_ROWS:]:
        count, size = sum(row["tensors"] for row in rest), sum(row["bytes"] for row in rest)
        table.add_row(f"{len(rest)} more", "", str(count), gib(size))
    return table
