"""Applies a series to a tree, or reverts it: all or nothing, on exactly the expected files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nibble.engine.patching import swap
from nibble.engine.patching.diff import DiffError
from nibble.engine.patching.diff import apply as apply_change
from nibble.engine.patching.series import Patch, Series
from nibble.engine.patching.tree import Tree
from nibble.errors import ExitCode, NibbleError

# Inside the folder that is exchanged, so that it and the patched files appear and vanish together.
RECORD_FOLDER = ".nibble-patches"
PatchState = Literal["applied", "not applied", "not applicable"]


@dataclass(frozen=True)
class Record:
    """What lies in a patched tree: the patches (name -> sha256), and for each touched file its
    sha256 before and after.
    """

    patches: Mapping[str, str]
    before: Mapping[str, str]
    after: Mapping[str, str]


NOTHING = Record({}, {}, {})


def unit(tree: Tree) -> Path:
    """The folder that is exchanged as a whole: the package, or for a source archive all of it."""
    return tree.root if tree.layout == "source" else tree.root / "vllm"


def applicable(tree: Tree, patch: Patch) -> bool:
    """A wheel holds the package only: patches of csrc/ are for the source layout."""
    return tree.layout == "source" or all(path.startswith("vllm/") for path in patch.paths)


def patch_states(tree: Tree, series: Series) -> dict[str, PatchState]:
    """The state of each patch in this tree. Raises NibbleError (exit 6) where another program
    changed a touched file.
    """
    record = _current_record(tree, series)
    states: dict[str, PatchState] = {}
    for patch in series.patches:
        if not applicable(tree, patch) or tree.release != series.release:
            states[patch.name] = "not applicable"
        else:
            states[patch.name] = (
                "applied" if record.patches.get(patch.name) == patch.sha256 else "not applied"
            )
    return states


def apply_series(tree: Tree, series: Series) -> list[str]:
    """Bring the tree to this series, from any earlier one. The names now applied; [] if nothing had
    to change.

    Raises NibbleError (exit 6) with the tree untouched: another release, a file neither pristine
    nor ours, no permission.
    """
    _check_release(tree, series)
    with _alone(tree):
        record = _current_record(tree, series)
        wanted = [patch for patch in series.patches if applicable(tree, patch)]
        patches = {patch.name: patch.sha256 for patch in wanted}
        if dict(record.patches) == patches:
            return []
        originals = {
            path: _original(tree, record, path) for patch in wanted for path in patch.paths
        }
        _check_pristine(tree, series, originals)
        texts = _patched(wanted, originals)
        files: dict[str, bytes] = {path: _original(tree, record, path) for path in record.before}
        files |= {path: text.encode() for path, text in texts.items()}
        new = Record(
            patches,
            {path: series.pristine[path] for path in texts},
            {p: _digest(t.encode()) for p, t in texts.items()},
        )
        _swap(tree, files, new, originals)
        return list(patches)


def revert_series(tree: Tree, series: Series) -> list[str]:
    """Put every touched file back byte for byte; the names taken back, or [] if none was
    applied. Raises like apply_series.
    """
    with _alone(tree):
        record = _current_record(tree, series)
        if not record.patches:
            return []
        originals = {path: _original(tree, record, path) for path in record.before}
        _swap(tree, dict(originals), None, {})
        return list(record.patches)


@contextmanager
def _alone(tree: Tree) -> Iterator[None]:
    """No other nibble changes this tree meanwhile."""
    try:
        with swap.alone(unit(tree)):
            yield
    except OSError as error:
        raise _cannot_write(tree, error) from None


def _check_release(tree: Tree, series: Series) -> None:
    if tree.release != series.release:
        raise NibbleError(
            ExitCode.VERIFY,
            what=f"{tree.root} has vllm {tree.version}, but patches/{series.project} needs"
            f" {series.release}",
            expected=f"vllm {series.release}",
            action="install that release, or run `nibble patches status` to see what this one"
            " needs",
        )


def _current_record(tree: Tree, series: Series) -> Record:
    """What is applied now, by the files themselves. Raises NibbleError where another program
    changed one.
    """
    if tree.release != series.release:
        return NOTHING
    record = _read_record(tree)
    found = {path: _digest_of(tree, path) for path in sorted({*series.pristine, *record.after})}
    for path, digest in found.items():
        if digest not in (
            "",
            series.pristine.get(path),
            record.before.get(path),
            record.after.get(path),
        ):
            raise _changed(tree, path, digest, series)
    differing = [path for path, digest in record.after.items() if found[path] != digest]
    if not differing:
        return record
    # A fresh installation over the patched one leaves the record behind, and every file is pristine
    # again.
    if patched := [path for path in record.after if path not in differing]:
        raise _changed(tree, patched[0], found[patched[0]], series)
    return NOTHING


def _changed(tree: Tree, path: str, digest: str, series: Series) -> NibbleError:
    return NibbleError(
        ExitCode.VERIFY,
        what=f"{path} in {tree.root} is neither vllm {series.release}'s file nor a file that"
        " nibble patched",
        expected=f"sha256 {series.pristine.get(path, 'unknown')[:12]}…, found {digest[:12]}…",
        action="install vllm again (`make clean setup`), or undo the change",
    )


def _read_record(tree: Tree) -> Record:
    path = unit(tree) / RECORD_FOLDER / "record.json"
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError, TypeError) as error:
        raise NibbleError(
            ExitCode.VERIFY,
            what=f"{path} cannot be read ({error})",
            expected="nibble's record",
            action="install vllm again",
        ) from None


def _original(tree: Tree, record: Record, path: str) -> bytes:
    """The file before any patch: kept beside the record, or the file itself where nothing
    touches it yet.
    """
    kept = unit(tree) / RECORD_FOLDER / "originals" / path
    try:
        return kept.read_bytes() if path in record.before else tree.path(path).read_bytes()
    except OSError as error:
        raise NibbleError(
            ExitCode.VERIFY,
            what=f"cannot read {path} of {tree.root} ({error.strerror})",
            expected="a complete vllm",
            action="install vllm again",
        ) from None


def _check_pristine(tree: Tree, series: Series, originals: Mapping[str, bytes]) -> None:
    for path, content in originals.items():
        if _digest(content) != series.pristine[path]:
            raise NibbleError(
                ExitCode.VERIFY,
                what=f"{path} of {tree.root} is not the file that patches/{series.project} changes",
                expected=f"sha256 {series.pristine[path][:12]}…, found {_digest(content)[:12]}…",
                action="install vllm again",
            )


def _patched(patches: list[Patch], originals: Mapping[str, bytes]) -> dict[str, str]:
    """The texts after all patches. Raises NibbleError naming the patch that does not fit."""
    texts = {path: content.decode() for path, content in originals.items()}
    for patch in patches:
        for change in patch.changes:
            try:
                texts[change.path] = apply_change(texts[change.path], change)
            except DiffError as error:
                what = f"patches/vllm/{patch.name}.patch does not apply: {error}"
                raise NibbleError(
                    ExitCode.VERIFY,
                    what=what,
                    expected="a series whose patches apply in order",
                    action="generate the patch again",
                ) from None
    return texts


def _swap(
    tree: Tree, files: Mapping[str, bytes], record: Record | None, originals: Mapping[str, bytes]
) -> None:
    """Write all of it in one step; `record` None removes the record."""
    folder = unit(tree)
    inside = {str(tree.path(path).relative_to(folder)): content for path, content in files.items()}

    def keep_record(copy: Path) -> None:
        kept = copy / RECORD_FOLDER
        if kept.exists():
            shutil.rmtree(kept)
        if record is None:
            return
        for path, content in originals.items():
            place = kept / "originals" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        (kept / "record.json").write_text(
            json.dumps(vars(record), indent=1) + "\n", encoding="utf-8"
        )

    swap.replace_files(folder, inside, keep_record)


def _cannot_write(tree: Tree, error: OSError) -> NibbleError:
    return NibbleError(
        ExitCode.VERIFY,
        what=f"cannot change {tree.root} ({error.strerror or error})",
        expected="a folder that this user can write",
        action="run it as the folder's owner, or patch during the image build",
    )


def _digest_of(tree: Tree, path: str) -> str:
    return _digest(tree.path(path).read_bytes()) if tree.has(path) else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
