"""Writes a bundle: everything into a new folder, checksums last."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble import __version__
from nibble.bundle.image import Image, engine, find_image, packages_of, save_image
from nibble.bundle.model_files import ModelFiles, files_of, write_model
from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import free_bytes, gib, write_problem
from nibble.machine.paths import root

SCRIPTS = ("install.sh", "serve.sh", "engine.sh")
MARGIN_BYTES = 1 << 28


@dataclass(frozen=True)
class Bundle:
    """What was written."""

    folder: Path
    image: Image
    model: ModelFiles
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For `nibble bundle --json` and bundle.json."""
        return {
            "folder": str(self.folder),
            "nibble": __version__,
            "image": {"name": self.image.name, "id": self.image.id, "target": self.image.target},
            "model": {"name": self.model.word, "revision": self.model.revision},
            "size_bytes": self.size_bytes,
        }


def write_bundle(
    model: str,
    revision: str | None,
    folder: Path,
    image_name: str,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Bundle:
    """Write the bundle of a model and an image into `folder`, which must not exist. After an error
    nothing half-written stays.
    """
    _refuse_existing(folder)
    program = engine(environ)
    image = find_image(image_name, program)
    files = files_of(model, revision, environ)
    _refuse_without_room(folder, image, files)
    begun = folder.with_name(f".{folder.name}.begun")
    shutil.rmtree(begun, ignore_errors=True)
    try:
        begun.mkdir(parents=True)
        say(f"saving {image.name}: {gib(image.size_bytes)}")
        save_image(image, program, begun / "image.tar")
        say(f"copying {files.word}: {gib(files.size_bytes)}")
        write_model(files, begun)
        _write_licences(begun, packages_of(image, program))
        _write_scripts(begun, image, files)
        size = sum(path.stat().st_size for path in _regular(begun))
        bundle = Bundle(folder, image, files, size)
        (begun / "bundle.json").write_text(json.dumps(bundle.to_json(), indent=1) + "\n")
        say("computing checksums")
        _write_checksums(begun)
        begun.rename(folder)
    except OSError as error:
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"{folder} could not be written ({error.strerror})",
            action="free disk space, or name a folder elsewhere",
        ) from None
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return bundle


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{folder} exists",
            expected="a new folder",
            action="name another one, or remove it",
        )
    if problem := write_problem(folder.absolute().parent):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{folder} cannot be written ({problem})",
            expected="a place for a new folder",
            action="name another one",
        )


def _refuse_without_room(folder: Path, image: Image, files: ModelFiles) -> None:
    needed, free = image.size_bytes + files.size_bytes + MARGIN_BYTES, free_bytes(folder)
    if needed > free:
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"the bundle takes {gib(needed)}, and {folder.parent} has {gib(free)}",
            expected="enough disk space",
            action="free disk space, or name a folder elsewhere",
        )


def _write_licences(folder: Path, packages: str) -> None:
    licences = folder / "licences"
    licences.mkdir()
    shutil.copyfile(root() / "LICENSE", licences / "nibble.txt")
    header = "# Python packages of the image: name, version, licence as the package states it\n"
    (licences / "packages.tsv").write_text(header + packages)


def _write_scripts(folder: Path, image: Image, files: ModelFiles) -> None:
    for name in SCRIPTS:
        shutil.copy(root() / "docker/bundle" / name, folder / name)
    facts = {"IMAGE": image.name, "MODEL": files.word, "TARGET": image.target}
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in facts.items()]
    (folder / "bundle.env").write_text("".join(lines))


def _write_checksums(folder: Path) -> None:
    lines = []
    for path in _regular(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder)}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))


def _regular(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
