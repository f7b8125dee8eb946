"""The image's part of a bundle: its archive, and the licences of what is inside."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nibble.errors import ExitCode, NibbleError
from nibble.machine.container_engine import container_engine

TARGET_LABEL = "ai.nibble.target"
LIST_PACKAGES = Path(__file__).with_name("list_packages.py")


@dataclass(frozen=True)
class Image:
    """An image of the local engine."""

    name: str
    id: str
    target: str
    size_bytes: int


def engine(environ: Mapping[str, str]) -> str:
    """The program that runs containers: DOCKER, docker or podman."""
    given = environ.get("DOCKER")
    if given and not shutil.which(given):
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what=f"DOCKER={given} is not a program",
            expected="docker or podman",
            action="correct or unset DOCKER",
        )
    found = container_engine(environ)
    if found is None:
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what="neither docker nor podman is in PATH",
            expected="the container engine that has the image",
            action="run it on the machine that has the image, or set DOCKER to the program",
        )
    return found


def find_image(name: str, program: str) -> Image:
    """Raises NibbleError when the engine does not answer or has no such image of nibble."""
    result = _run(program, "image", "inspect", name)
    if result.returncode:
        _refuse_without_answer(program)
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{program} has no image {name} ({_last_line(result.stderr)})",
            expected="an image of nibble",
            action=f"run ./build.sh {name.rpartition(':')[2]}, or name one with --image",
        )
    (facts,) = json.loads(result.stdout)
    target = (facts["Config"].get("Labels") or {}).get(TARGET_LABEL, "")
    if not target:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{name} has no label {TARGET_LABEL}",
            expected="an image of nibble",
            action="build one with ./build.sh",
        )
    return Image(name, facts["Id"], target, int(facts["Size"]))


def _refuse_without_answer(program: str) -> None:
    result = _run(program, "version")
    if result.returncode:
        raise NibbleError(
            ExitCode.NO_HARDWARE,
            what=f"{program} does not answer: {_last_line(result.stderr)}",
            expected="a container engine that runs, and that you may use",
            action="start it (`systemctl start docker`), or set DOCKER_HOST or DOCKER to another",
        )


def save_image(image: Image, program: str, to: Path) -> None:
    """Write the image's archive; raises NibbleError with the engine's last line."""
    result = _run(program, "save", "--output", str(to), image.name)
    if result.returncode:
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"{program} save ended with {result.returncode}: {_last_line(result.stderr)}",
            action="free disk space, then run it again",
        )


def packages_of(image: Image, program: str) -> str:
    """Name, version and licence of the image's Python packages, one a line."""
    options = ("--rm", "--network", "none", "--entrypoint", "/opt/venv/bin/python")
    result = _run(program, "run", *options, image.name, "-c", LIST_PACKAGES.read_text())
    if result.returncode:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{image.name} does not run here ({_last_line(result.stderr)})",
            expected="an image for this machine's processor",
            action="make the bundle on a machine of the same kind",
        )
    return result.stdout


def _run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
