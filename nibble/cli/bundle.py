"""`nibble bundle`: an image and a model in one folder, for a machine without a network."""

from __future__ import annotations

from pathlib import Path

from nibble.bundle.write import write_bundle
from nibble.cli.common import print_json, say
from nibble.machine.disk import gib
from nibble.machine.paths import root
from nibble.plan.gather import hub_environ, read_wishes
from nibble.recipes.recipe import load_recipe


def bundle(model: str, folder: Path, image: str, environ: dict[str, str], as_json: bool) -> None:
    """Write the folder and say how to use it."""
    asked = read_wishes([model], environ, ())
    settings = asked.settings
    recipe = load_recipe(model, root()) if settings.recipe == "auto" else None
    revision = settings.revision or (recipe.revision if recipe else "") or None
    made = write_bundle(model, revision, folder, image, hub_environ(asked), say)
    if as_json:
        print_json(made.to_json())
    else:
        say(
            f"{folder}: {gib(made.size_bytes)}; on the other machine: ./install.sh, then ./serve.sh"
        )
