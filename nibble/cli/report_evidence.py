"""`nibble recipes verify --report FILE`: evidence from a self-test and the server that runs now."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nibble.cli.common import print_json
from nibble.cli.status import read_status
from nibble.errors import ExitCode, NibbleError
from nibble.machine.out_path import cannot_write
from nibble.machine.paths import root
from nibble.recipes.evidence import evidence_path, make_evidence, section
from nibble.recipes.recipe import recipe_path
from nibble.trials.report import read_report


def show_report_evidence(
    model: str, report: Path, out: Path | None, environ: Mapping[str, str], as_json: bool
) -> None:
    """Write the evidence and print the lines for the recipe."""
    found = report_evidence(model, report, out, environ)
    if as_json:
        print_json(found)
    else:
        print(found["section"], end="")
        print(f"{found['path']} written; put these lines into {found['recipe']}", file=sys.stderr)


def report_evidence(
    model: str, file: Path, out: Path | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Write the evidence; its path, the recipe and the lines for it. Raises NibbleError."""
    recipe = recipe_path(model, root())
    if recipe is None:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{model} is not the id of a model",
            expected="ORG/NAME",
            action="name the model as its recipe does",
        )
    report, _ = read_report(file)
    evidence = make_evidence(model, report, read_status(environ))
    path = out or evidence_path(recipe, report.place.target)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(evidence, indent=1) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise cannot_write(path, error.strerror) from None
    shown = path.relative_to(root()) if path.is_relative_to(root()) else path.name
    lines = section(evidence, str(shown))
    return {"path": str(path), "recipe": str(recipe), "section": lines, "evidence": evidence}
