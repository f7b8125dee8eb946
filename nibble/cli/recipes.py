"""`nibble recipes list|show|lint|verify`: what is known about serving a model on a target."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nibble.cli import verify_recipe
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
def recipes_show(
    model: Annotated[str, typer.Argument(help="An id of `nibble recipes list`.")],
    as_json: Json = False,
) -> None:
    """One recipe: what it sets for each target, and on what evidence."""
    from nibble.cli.show_recipes import recipe_data, show_recipe

    data = recipe_data(model)
    print_json(data) if as_json else show_recipe(data)


@app.command("lint")
def recipes_lint(
    paths: Annotated[list[str] | None, typer.Argument(help="Ids of recipes. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Check recipes against the installed vLLM. Flags, choices, nested keys and variables."""
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


app.command("verify")(verify_recipe.verify)
