"""`nibble recipes list|show|lint`: what is known about serving a model on a target."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nibble.cli.common import Json, print_json
from nibble.errors import ExitCode

app = typer.Typer(
    no_args_is_help=True, help="Recipes: what is known about serving a model on a target."
)


@app.command("list")
def recipes_list(as_json: Json = False) -> None:
    """All recipes, with the status for each target."""
    from nibble.cli.show_recipes import recipe_rows, show_recipes

    rows = recipe_rows()
    print_json(rows) if as_json else show_recipes(rows)


@app.command("show")
def recipes_show(model: str, as_json: Json = False) -> None:
    """One recipe: what it sets for each target, and on what evidence."""
    from nibble.cli.show_recipes import recipe_data, show_recipe

    data = recipe_data(model)
    print_json(data) if as_json else show_recipe(data)


@app.command("verify")
def recipes_verify(
    model: str,
    report: Annotated[
        Path, typer.Option(help="Report of `nibble selftest --out FILE` on this machine.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: beside the recipe, where `lint` looks."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a self-test's report and the running server of a model into evidence of its recipe."""
    from nibble.cli.verify_recipe import verify

    found = verify(model, report, out, dict(os.environ))
    if as_json:
        print_json(found)
    else:
        print(found["section"], end="")
        print(f"{found['path']} written; put these lines into {found['recipe']}", file=sys.stderr)


@app.command("lint")
def recipes_lint(
    paths: Annotated[list[str] | None, typer.Argument()] = None, as_json: Json = False
) -> None:
    """Check every flag, choice, nested key and variable against the installed vLLM."""
    from nibble.machine.paths import root
    from nibble.recipes.lint import lint

    problems = lint(root(), paths or ())
    if as_json:
        print_json([vars(problem) for problem in problems])
    else:
        for problem in problems:
            print(problem.line())
        print(f"{len(problems)} problem(s)", file=sys.stderr)
    raise typer.Exit(ExitCode.VERIFY if problems else ExitCode.OK)
