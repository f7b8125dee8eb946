"""The two tables of docs/patches.md for one tree: whether each fix is needed and in place."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nibble.engine.patching.apply import RECORD_FOLDER, PatchState, patch_states, unit
from nibble.engine.patching.probe import Finding, Row
from nibble.engine.patching.run import Result, probe_names, probes_folder, rows, run
from nibble.engine.patching.series import Series, load_series
from nibble.engine.patching.tree import Tree, open_tree
from nibble.errors import ExitCode, NibbleError

Word = Literal[
    "applied", "needed", "not fixed", "fixed upstream", "not needed", "not applicable", "failed"
]
MEANING: Mapping[Word, str] = {
    "applied": "this release has the defect; nibble's fix is in place and the probe passes",
    "needed": "this release has the defect and nibble's fix is not in place",
    "not fixed": "this release has the defect and nibble has no fix",
    "fixed upstream": "this release does not have the defect",
    "not needed": "no release has the defect",
    "not applicable": "this tree or machine cannot run the probe (no sources, FlashInfer or"
    " compiler)",
    "failed": (
        "nibble's fix is in place and the probe still shows the defect, or the probe crashed"
    ),
}
REPORT = "report.json"


@dataclass(frozen=True)
class Line:
    """One row, judged."""

    id: str
    title: str
    word: Word
    detail: str
    fix: str  # "patch vllm/NAME", "rule …"; empty: none
    probe: str
    seconds: float

    @property
    def in_order(self) -> bool:
        """Whether a build may go on with this."""
        return self.word not in ("needed", "failed")


def installed_tree() -> Tree:
    """vLLM as this interpreter would import it; it is not imported. Raises NibbleError (exit 6)
    without one.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise NibbleError(
            ExitCode.VERIFY,
            what="vLLM is not installed",
            expected="an installed vllm",
            action="run `make setup`, or name a tree with --root",
        )
    return open_tree(Path(next(iter(found.submodule_search_locations))).parent)


def look(tree: Tree, names: Sequence[str] | None = None, jobs: int | None = None) -> list[Line]:
    """Run the probes and judge every row, in the order of the tables."""
    series = load_series("vllm")
    states = patch_states(tree, series)
    wanted = list(names or probe_names())
    found = zip(rows(wanted).values(), run(tree, wanted, jobs), strict=True)
    lines = [judge(row, result, states) for row, result in found]
    return sorted(lines, key=lambda line: row_order(line.id))


def judge(row: Row, result: Result, states: Mapping[str, PatchState]) -> Line:
    """What a probe's result means beside what nibble does about the row."""
    fix = f"{row.fix.kind} {row.fix.at}" if row.fix else ""
    line = Line(row.id, row.title, "failed", "", fix, result.probe, result.seconds)
    if result.finding is None:
        return replace(line, detail=result.error)
    if result.finding.state == "not applicable":
        return replace(line, word="not applicable", detail=result.finding.detail)
    if row.fix and row.fix.kind == "patch":
        word, shown = _patched(
            result.finding, states.get(row.fix.at.partition("/")[2], "not applicable")
        )
    elif row.fix:
        word, shown = _answered(result.finding, result.remedy)
    else:
        once = "defect" in row.expect.values()
        sound: Word = "fixed upstream" if once else "not needed"
        word, shown = ("not fixed" if result.finding.state == "defect" else sound), result.finding
    return replace(line, word=word, detail=shown.detail)


def _patched(finding: Finding, state: PatchState) -> tuple[Word, Finding]:
    if state == "applied":
        return ("applied" if finding.state == "sound" else "failed"), finding
    return ("fixed upstream" if finding.state == "sound" else "needed"), finding


def _answered(finding: Finding, remedy: Finding | None) -> tuple[Word, Finding]:
    """A flag, rule, variable, plugin or check: the tree keeps its defect, and the remedy shows
    it does no harm.
    """
    if finding.state == "sound":
        return "fixed upstream", finding
    if remedy is None or remedy.state != "sound":
        return "needed", remedy or finding
    return "applied", remedy


def row_order(row_id: str) -> tuple[int, int, str]:
    """Seed rows by number and then by name, then the live defects N1, N2, …"""
    live = row_id[:1] == "N" and row_id[1:].isdigit()
    digits = (
        "".join(char for char in row_id if char.isdigit()) if live or row_id[:1].isdigit() else ""
    )
    return int(live), int(digits or 1000), row_id


def check(tree: Tree, lines: Sequence[Line]) -> None:
    """Raise NibbleError (exit 6) naming what is not in order."""
    wrong = [line for line in lines if not line.in_order]
    if wrong:
        first = wrong[0]
        more = (
            f", and {len(wrong) - 1} more ({', '.join(line.id for line in wrong[1:])})"
            if wrong[1:]
            else ""
        )
        raise NibbleError(
            ExitCode.VERIFY,
            what=f"{first.id} {first.word} in {tree.root}: {first.title}: {first.detail}{more}",
            expected="every probe to pass",
            action=(
                "run `nibble patches apply`"
                if first.word == "needed" and first.fix.startswith("patch ")
                else (
                    f"run `python -m nibble.engine.patching.run --root {tree.root} {first.probe}`"
                    " to see it alone"
                )
            ),
        )


def keep_report(tree: Tree, lines: Sequence[Line]) -> None:
    """Leave the table beside the record for `nibble doctor`; a tree without patches or without
    permission keeps none.
    """
    folder = unit(tree) / RECORD_FOLDER
    data = {"key": _report_key(tree), "lines": [asdict(line) for line in lines]}
    try:
        (folder / REPORT).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError:
        return


def read_report(tree: Tree) -> list[Line] | None:
    """The table of the last whole `check` of exactly these patches and probes, or None."""
    try:
        data = json.loads((unit(tree) / RECORD_FOLDER / REPORT).read_text(encoding="utf-8"))
        return (
            [Line(**line) for line in data["lines"]] if data["key"] == _report_key(tree) else None
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # none, cut short, or of another version of nibble
        return None


def _report_key(tree: Tree) -> str:
    """Changes with the release, the series and the probes."""
    folder = probes_folder().parent
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.patch"), *folder.rglob("series")])
    content = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(tree.version.encode() + content).hexdigest()


def patch_summary(series: Series, states: Mapping[str, PatchState]) -> list[dict[str, Any]]:
    """The patches with their state, as plain data."""
    return [
        {
            "name": patch.name,
            "state": states[patch.name],
            "summary": patch.summary,
            "paths": list(patch.paths),
        }
        for patch in series.patches
    ]
