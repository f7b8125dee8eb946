"""Recipes as plain data and as tables, for `nibble recipes`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nibble.cli.tables import wide_console
from nibble.engine.flags import write_flag
from nibble.machine.paths import root
from nibble.machine.targets import TARGET_NAMES
from nibble.recipes.recipe import list_recipes, load_recipe, no_recipe
from nibble.recipes.resolution import resolve


def recipe_rows() -> list[dict[str, Any]]:
    """One row for each recipe: id, revision, scheme, status by target."""
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
    for name in TARGET_NAMES:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(row["id"], *(row["status"][name] for name in TARGET_NAMES))
    wide_console().print(table)


def recipe_data(model: str) -> dict[str, Any]:
    """A recipe resolved for each of its targets."""
    recipe = load_recipe(model, root())
    if recipe is None:
        raise no_recipe(model, root())
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
