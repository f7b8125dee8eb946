"""A result on disk: results.json, a page, and the plot beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nibble.bench.result import Measured, measured_from_json
from nibble.errors import ExitCode, NibbleError

FORMAT = "nibble bench 1"
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
JSON, MARKDOWN, PLOT = "results.json", "README.md", "results"


def write_json(folder: Path, result: Mapping[str, Any]) -> None:
    """Replace the result atomically: an end in the middle leaves the last whole one. Raises NO_FIT
    where the disk is full.
    """
    scratch = folder / f".{JSON}"
    try:
        scratch.write_text(json.dumps(result, indent=1) + "\n")
        scratch.replace(folder / JSON)
    except OSError as error:
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"{folder / JSON} could not be written ({error.strerror or error})",
            action="free space there, or name another folder with --out",
        ) from None


def read_result(path: Path) -> tuple[dict[str, Any], tuple[Measured, ...]]:
    """A result and its cells of the first side. Raises USAGE where it is not one."""
    file = path / JSON if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        _ = found["model"]["id"], found["machine"].keys()
        cells = tuple(measured_from_json(one) for one in found["cells"])
        side = found["sides"][0]["name"]
        return found, tuple(one for one in cells if one.side == side)
    except (OSError, *_MALFORMED) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{file} is not a result of `nibble bench` ({why})",
            expected="a results.json that `nibble bench --out` wrote",
            action="correct --compare",
        ) from None
