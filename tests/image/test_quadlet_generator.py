"""docker/quadlet/nibble.container through the generator of Podman 5.4, as systemd runs it at boot.

The generator is taken from Debian 13's package and runs with that release's C library. Nothing is
installed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.debian import unpacked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
UNIT = ROOT / "docker/quadlet/nibble.container"


@pytest.fixture(scope="session")
def podman_root() -> Path:
    """A folder with Debian 13's Podman and C library, unpacked."""
    return unpacked("podman-trixie", "trixie", ("podman", "libc6"))


def generate(podman_root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    libraries = podman_root / "usr/lib/x86_64-linux-gnu"
    command = [
        str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries),
        str(podman_root / "usr/libexec/podman/quadlet"), "-dryrun",
    ]  # fmt: skip
    environ = os.environ | {"QUADLET_UNIT_DIRS": str(folder)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_the_generator_turns_the_unit_into_the_documented_command(
    podman_root: Path, tmp_path: Path
) -> None:
    (tmp_path / UNIT.name).write_text(UNIT.read_text())
    result = generate(podman_root, tmp_path)
    assert result.returncode == 0, result.stderr
    service = result.stdout.partition("---nibble.service---")[2]
    (start,) = re.findall(r"^ExecStart=(.*)$", service, re.M)
    words = shlex.split(start)
    assert words[:2] == ["/usr/bin/podman", "run"] and words[-2:] == [
        "localhost/nibble:gb10",
        "serve",
    ]
    for option in ("--read-only", "--stop-timeout=60", "--cap-drop", "--device"):
        assert option in words
    assert "RestartPreventExitStatus=2 5 6 75" in service and "TimeoutStopSec=75" in service


def test_the_generator_refuses_a_key_that_it_does_not_know(
    podman_root: Path, tmp_path: Path
) -> None:
    """So that the test above can fail."""
    text = UNIT.read_text().replace("[Container]\n", "[Container]\nNoSuchKey=1\n")
    (tmp_path / UNIT.name).write_text(text)
    result = generate(podman_root, tmp_path)
    assert result.returncode != 0 and "NoSuchKey" in result.stderr
