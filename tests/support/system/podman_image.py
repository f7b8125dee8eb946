"""The CPU image in a machine's Podman without a copy of its files.

Podman gets an image with as many small layers as Docker's has; then each layer's folder is filled
with hard links to Docker's. Both engines keep layers in overlayfs' own form.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.support.docker.containers import docker
from tests.support.system.machine import Machine

STORAGE = "/var/lib/containers"
CONFIG = ("User", "ExposedPorts", "Env", "Cmd", "Healthcheck", "WorkingDir", "Entrypoint", "Labels")
_MARK = "layer-of-docker-"


def give(machine: Machine, volume: str, source: str, name: str, created: str, **env: str) -> None:
    """Make `source` of this host's engine the image `name` of the machine, with more variables.

    `volume` holds the machine's STORAGE.
    """
    image = json.loads(docker("image", "inspect", source).stdout)[0]
    layers = _layers(image["GraphDriver"]["Data"])
    config = {key: image["Config"].get(key) for key in CONFIG}
    config["Env"] = [*config["Env"], *(f"{key}={value}" for key, value in env.items())]
    disk = Path(docker("volume", "inspect", volume, "--format", "{{.Mountpoint}}").stdout.strip())
    archive = disk / "image.tar"
    archive.write_bytes(_archive(config, layers, name, created))
    machine.run("podman", "load", "--quiet", "--input", f"{STORAGE}/{archive.name}")
    archive.unlink()
    found = json.loads(machine.run("podman", "image", "inspect", name))[0]["GraphDriver"]["Data"]
    for layer, place in zip(layers, _layers(found), strict=True):
        _fill(disk / place.relative_to(STORAGE), layer)


def _layers(data: dict[str, Any]) -> list[Path]:
    """The folders of an image's layers, the lowest first."""
    lower = data.get("LowerDir", "").split(":") if data.get("LowerDir") else []
    return [Path(path) for path in [*reversed(lower), data["UpperDir"]]]


def _fill(place: Path, layer: Path) -> None:
    mark = place / f"{_MARK}{layer.parent.name}"
    if mark.exists():  # else another image has filled it
        subprocess.run(["cp", "-al", f"{layer}/.", f"{place}/"], check=True)
        mark.unlink()


def _archive(config: dict[str, Any], layers: list[Path], name: str, created: str) -> bytes:
    """What `docker save` writes, with one empty file in each layer."""
    bodies = [_tar({f"{_MARK}{layer.parent.name}": b""}) for layer in layers]
    digests = [f"sha256:{hashlib.sha256(body).hexdigest()}" for body in bodies]
    about = {
        "architecture": "amd64", "os": "linux", "created": created, "config": config,
        "rootfs": {"type": "layers", "diff_ids": digests},
    }  # fmt: skip
    files = {f"{number}.tar": body for number, body in enumerate(bodies)}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": list(files)}]
    texts = {"config.json": about, "manifest.json": manifest}
    return _tar({key: json.dumps(value).encode() for key, value in texts.items()} | files)


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()
