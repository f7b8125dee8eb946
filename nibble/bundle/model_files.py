"""The model's part of a bundle: which files, and where a container finds them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.hub.access import is_model_id
from nibble.hub.files import storage_folder
from nibble.hub.packaged import PACKAGED
from nibble.hub.pull import pull
from nibble.machine.paths import demo_models

IN_IMAGE = "/models"  # where serve.sh mounts the folder `models`


@dataclass(frozen=True)
class ModelFiles:
    """`word`: the model as `nibble serve` in the container takes it. `links`: path in the bundle ->
    target, for symbolic links. `copies`: path in the bundle -> file. A model of the image has
    neither.
    """

    word: str
    revision: str = ""
    copies: Mapping[str, Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(path.stat().st_size for path in self.copies.values())


def files_of(model: str, revision: str | None, environ: Mapping[str, str]) -> ModelFiles:
    """The files of a model; one of the Hugging Face Hub is downloaded first, if it is not here.

    A Hub model keeps the layout of Hugging Face's cache, so that its id, recipe and revision stay
    the same in the container.
    """
    if model in demo_models() or model in PACKAGED:
        return ModelFiles(model)
    folder = Path(model)
    if folder.is_dir():
        name = folder.resolve().name
        copies = {f"models/{name}/{path.relative_to(folder)}": path for path in _files(folder)}
        if f"models/{name}/config.json" not in copies:
            raise NibbleError(
                ExitCode.MODEL,
                what=f"{folder} has no config.json",
                expected="a folder with a model",
                action="name the folder that has it",
            )
        return ModelFiles(f"{IN_IMAGE}/{name}", copies=copies)
    if not is_model_id(model):
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{model} is neither a folder nor a model of the Hugging Face Hub",
            expected="a folder or ORG/NAME",
            action="correct the model",
        )
    found = pull(model, revision, environ)
    return _of_snapshot(model, found.path)


def _of_snapshot(model: str, snapshot: Path) -> ModelFiles:
    """Of Hugging Face's cache: this snapshot's links, their blobs, and the refs that name it."""
    storage = snapshot.parent.parent
    top = f"huggingface/hub/{storage_folder(Path(), model)}"
    copies: dict[str, Path] = {}
    links: dict[str, str] = {}
    for path in _files(snapshot):
        place = f"{top}/{path.relative_to(storage)}"
        if path.is_symlink():
            links[place] = os.readlink(path)
            blob = path.resolve()
            copies[f"{top}/{blob.relative_to(storage.resolve())}"] = blob
        else:
            copies[place] = path
    for path in _files(storage / "refs"):
        if path.read_text().strip() == snapshot.name:
            copies[f"{top}/{path.relative_to(storage)}"] = path
    return ModelFiles(model, snapshot.name, copies, links)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if not path.is_dir())


def write_model(files: ModelFiles, into: Path) -> None:
    """Copy the files; on the same file system, a hard link takes their place."""
    for place, source in files.copies.items():
        target = into / place
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.resolve(), target)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, target)
    for place, to in files.links.items():
        target = into / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(to)
