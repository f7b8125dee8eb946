"""The program that runs containers on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

ENGINES = ("docker", "podman")


def container_engine(environ: Mapping[str, str]) -> str | None:
    """The path of DOCKER, else of docker or podman on PATH; None without one."""
    names = (environ.get("DOCKER", ""), *ENGINES)
    return next((found for name in names if name and (found := shutil.which(name))), None)
