"""The state of one tree for each row of docs/patches.md: is the fix needed, and is it in place?"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from nibble.engine.patching.apply import RECORD_FOLDER, PatchState, patch_states, unit
from nibble.engine.patching.probe import Finding, Row
from nibble.engine.patching.run import Result, probe_names, probes_folder, rows, run
from nibble.engine.patching.series import load_series
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
    """A row with its state in the tree. `detail`: the probe's finding or error."""

    id: str
    title: str
    word: Word
    detail: str
    fix: str  # "patch vllm/NAME", "rule …"; empty: none
    probe: str
    seconds: float

    @property
    def in_order(self) -> bool:
        """Whether a build may continue with this state."""
        return self.word not in ("needed", "failed")


def installed_tree() -> Tree:
    """The vLLM that this interpreter would import, without importing it.

    Raises NibbleError (exit 6) if vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise NibbleError(
            ExitCode.VERIFY,
            what="vLLM is not installed",
            expected="an installed vllm",
            action="run `make setup`, or name a tree with --root",
        )
    return open_tree(Path(next(iter(spec.submodule_search_locations))).parent)


def look(tree: Tree, names: Sequence[str] | None = None, jobs: int | None = None) -> list[Line]:
    """Run the probes and return every row's state, in the order of the tables."""
    series = load_series("vllm")
    states = patch_states(tree, series)
    wanted = list(names or probe_names())
    results = zip(rows(wanted).values(), run(tree, wanted, jobs), strict=True)
    lines = [judge(row, result, states) for row, result in results]
    return sorted(lines, key=lambda line: row_order(line.id))


def judge(row: Row, result: Result, states: Mapping[str, PatchState]) -> Line:
    """The state of a row, from its probe's result and from nibble's fix."""
    fix = f"{row.fix.kind} {row.fix.at}" if row.fix else ""
    line = Line(row.id, row.title, "failed", "", fix, result.probe, result.seconds)
    if result.finding is None:
        return replace(line, detail=result.error)
    if result.finding.state == "not applicable":
        return replace(line, word="not applicable", detail=result.finding.detail)
    if row.fix and row.fix.kind == "patch":
        state = states.get(row.fix.at.partition("/")[2], "not applicable")
        return replace(line, word=_with_patch(result.finding, state), detail=result.finding.detail)
    if row.fix:
        word, shown = _with_remedy(result.finding, result.remedy)
        return replace(line, word=word, detail=shown.detail)
    return replace(line, word=_without_fix(result.finding, row), detail=result.finding.detail)


def _with_patch(finding: Finding, state: PatchState) -> Word:
    if state == "applied":
        return "applied" if finding.state == "sound" else "failed"
    return "fixed upstream" if finding.state == "sound" else "needed"


def _without_fix(finding: Finding, row: Row) -> Word:
    if finding.state == "defect":
        return "not fixed"
    had_defect = "defect" in row.expect.values()
    return "fixed upstream" if had_defect else "not needed"


def _with_remedy(finding: Finding, remedy: Finding | None) -> tuple[Word, Finding]:
    """For a fix outside the tree (flag, rule, variable, plugin, check), which keeps its defect.

    The remedy's finding shows whether the defect has an effect.
    """
    if finding.state == "sound":
        return "fixed upstream", finding
    if remedy is None or remedy.state != "sound":
        return "needed", remedy or finding
    return "applied", remedy


def row_order(row_id: str) -> tuple[int, int, str]:
    """The sort key of a row: numbered rows, named rows, then the defects N1, N2, … of vLLM 0.32."""
    live = row_id[:1] == "N" and row_id[1:].isdigit()
    digits = (
        "".join(char for char in row_id if char.isdigit()) if live or row_id[:1].isdigit() else ""
    )
    return int(live), int(digits or 1000), row_id


def check(tree: Tree, lines: Sequence[Line]) -> None:
    """Raise NibbleError (exit 6) if the state of a row is "needed" or "failed"."""
    wrong = [line for line in lines if not line.in_order]
    if wrong:
        first, others = wrong[0], [line.id for line in wrong[1:]]
        more = f", and {len(others)} more ({', '.join(others)})" if others else ""
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
    """Store the table beside the record for `nibble doctor`.

    Does nothing if the tree has no patches or is not writable.
    """
    folder = unit(tree) / RECORD_FOLDER
    data = {"key": _report_key(tree), "lines": [asdict(line) for line in lines]}
    try:
        (folder / REPORT).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError:
        return


def read_report(tree: Tree) -> list[Line] | None:
    """The table of the last full check with the current patches and probes, or None."""
    try:
        data = json.loads((unit(tree) / RECORD_FOLDER / REPORT).read_text(encoding="utf-8"))
        return (
            [Line(**line) for line in data["lines"]] if data["key"] == _report_key(tree) else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, incomplete, or from another version of nibble


def _report_key(tree: Tree) -> str:
    """A digest of the release, the series and the probes."""
    folder = probes_folder().parent
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.patch"), *folder.rglob("series")])
    content = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(tree.version.encode() + content).hexdigest()
