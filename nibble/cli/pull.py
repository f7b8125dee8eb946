"""`nibble pull`: downloads a model and shows a bar for each stage, else a line now and then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nibble.cli.common import say
from nibble.errors import ExitCode, NibbleError
from nibble.hub.dry_run import plan_pull, refuse_what_does_not_fit
from nibble.hub.pull import OnProgress, Progress, PullResult, as_lines, pull
from nibble.machine.paths import demo_models, root
from nibble.plan.gather import hub_environ, read_wishes
from nibble.recipes.recipe import load_recipe
from nibble.serve.progress import stderr_is_terminal


def pull_model(words: Sequence[str], environ: dict[str, str]) -> tuple[dict[str, Any], bool]:
    """Fetch a model, or with --dry-run only report; (the result, whether --json is set)."""
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
    recipe = load_recipe(settings.model, root()) if settings.recipe == "auto" else None
    revision = settings.revision or (recipe.revision if recipe else "") or None
    if "--dry-run" in asked.command.rest:
        plan = plan_pull(settings.model, revision, hub_environ(asked))
        for line in () if as_json else plan.lines():
            print(line)
        refuse_what_does_not_fit(plan)
        return plan.to_json() if as_json else {}, as_json
    with _shown(say) as on_progress:
        result = pull(settings.model, revision, hub_environ(asked), on_progress)
    if result.revision and not revision:
        say(
            f"{settings.model} is at {result.revision}; pin it with"
            f" NIBBLE_REVISION={result.revision}"
        )
    return _told(result), as_json


def _told(result: PullResult) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(result).items()
    }


@contextmanager
def _shown(say: Callable[[str], None]) -> Iterator[OnProgress]:
    """Show progress until the block ends; yields the function to call at each step."""
    if not stderr_is_terminal() or os.environ.get("TERM") == "dumb":
        yield as_lines(say)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("[nibble] {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
    )
    with Bars(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bars:
        tasks = {}

        def report(step: Progress) -> None:
            if step.stage not in tasks:
                tasks[step.stage] = bars.add_task(step.stage, total=step.total_bytes)
            bars.update(tasks[step.stage], completed=step.done_bytes, total=step.total_bytes)

        yield report
