"""Applies a series of patches to a tree, or reverts it, in one step and only on the expected files.

Standard library only: setup and the Dockerfiles run it before anything is installed.
"""

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

# Inside the folder that is exchanged, so that record and patched files change together.
RECORD_FOLDER = ".nibble-patches"
PatchState = Literal["applied", "not applied", "not applicable"]


@dataclass(frozen=True)
class Record:
    """The applied patches of a tree.

    patches: name -> sha256; before, after: path of each patched file -> its sha256.
    """

    patches: Mapping[str, str]
    before: Mapping[str, str]
    after: Mapping[str, str]


NOTHING = Record({}, {}, {})


def unit(tree: Tree) -> Path:
    """The folder that is exchanged as a whole: the package, or the whole source archive."""
    return tree.root if tree.layout == "source" else tree.root / "vllm"


def applicable(tree: Tree, patch: Patch) -> bool:
    """Whether the tree has the files of a patch. A wheel has only the package, without csrc/."""
    return tree.layout == "source" or all(path.startswith("vllm/") for path in patch.paths)


def patch_states(tree: Tree, series: Series) -> dict[str, PatchState]:
    """The state of each patch in this tree. Raises NibbleError (exit 6) if another program changed
    a file of the series.
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
    """Apply this series in place of any earlier one. Returns the patches now applied, or [] if the
    tree already has them.

    Raises NibbleError (exit 6) and leaves the tree unchanged if the release differs, a file is
    neither vLLM's nor patched by nibble, or the folder is not writable.
    """
    _check_release(tree, series)
    with _locked(tree):
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
    """Restore every patched file byte for byte. Returns the reverted patches.

    Raises NibbleError as apply_series does.
    """
    with _locked(tree):
        record = _current_record(tree, series)
        if not record.patches:
            return []
        originals = {path: _original(tree, record, path) for path in record.before}
        _swap(tree, dict(originals), None, {})
        return list(record.patches)


@contextmanager
def _locked(tree: Tree) -> Iterator[None]:
    """Lock the tree against other nibble processes."""
    try:
        with swap.locked(unit(tree)):
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
    """The record, after a check against the files. Raises NibbleError if another program changed
    one of them.
    """
    if tree.release != series.release:
        return NOTHING
    record = _read_record(tree)
    digests = {path: _digest_of(tree, path) for path in sorted({*series.pristine, *record.after})}
    for path, digest in digests.items():
        known = (series.pristine.get(path), record.before.get(path), record.after.get(path))
        if digest and digest not in known:
            raise _changed(tree, path, digest, series)
    differing = [path for path, digest in record.after.items() if digests[path] != digest]
    if not differing:
        return record
    # If vLLM was installed again over the patched files, the record is left and all files are
    # vLLM's.
    if patched := [path for path in record.after if path not in differing]:
        raise _changed(tree, patched[0], digests[patched[0]], series)
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
    """The content before any patch: the copy beside the record, or the file if it is unpatched."""
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
    """Path -> text after all patches. Raises NibbleError with the name of a patch that does not
    apply.
    """
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
    """Write files (path -> content) and record in one step. `record` None removes the record.

    originals: contents before any patch, which are stored beside the record.
    """
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
