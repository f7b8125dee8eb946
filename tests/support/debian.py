"""Files of Debian packages without an installation."""

from __future__ import annotations

import lzma
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.support.docker.images import CACHE
from tests.support.once import once

MIRROR = "http://deb.debian.org/debian"


def unpacked(name: str, suite: str, packages: Sequence[str], architecture: str = "amd64") -> Path:
    """The folder `name` of the tests' cache with the files of `packages` from `suite`."""
    return once(CACHE / name, lambda folder: unpack(folder, suite, packages, architecture))


def unpack(folder: Path, suite: str, packages: Sequence[str], architecture: str = "amd64") -> None:
    """Fetch `packages` and put their files below `folder`."""
    place = f"{MIRROR}/dists/{suite}/main/binary-{architecture}/Packages.xz"
    with urllib.request.urlopen(place) as page:
        index = lzma.decompress(page.read()).decode()
    for package in packages:
        entry = re.search(
            rf"^Package: {re.escape(package)}\n(?:.+\n)*?Filename: (\S+)", index, re.M
        )
        assert entry is not None, package
        with tempfile.NamedTemporaryFile(suffix=".deb") as archive:
            urllib.request.urlretrieve(f"{MIRROR}/{entry[1]}", archive.name)
            subprocess.run(["dpkg", "-x", archive.name, str(folder)], check=True)
