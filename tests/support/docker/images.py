"""The images that container tests use, as fixtures: built for real with BuildKit on a base made by
debootstrap.

No registry is needed. Everything is kept in the engine and in TEST_CACHE_DIR (default
~/.cache/nibble-tests):
a second run starts at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.docker import containers
from tests.support.paths import ROOT

__all__ = ["base_image", "build_environ", "cpu_image", "engine"]
CACHE = Path(os.environ.get("TEST_CACHE_DIR") or Path.home() / ".cache" / "nibble-tests")
BASE = "nibble-test-base:bookworm"


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine that answers; without one these tests are left out, and fail where
    CI=true.
    """
    if containers.engine_answers():
        return
    message = (
        "no Docker engine answers: container tests left out (setup/docker_engine.sh up starts one)"
    )
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def base_image(engine: None) -> str:
    """A Debian 12 without anything of ours; TEST_BASE_IMAGE names another one."""
    if given := os.environ.get("TEST_BASE_IMAGE"):
        return given
    if containers.docker("image", "inspect", BASE, check=False).returncode == 0:
        return BASE
    archive = CACHE / "base-bookworm.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            tree, partial = Path(folder) / "tree", Path(folder) / "base.tar"
            debootstrap = [
                "debootstrap",
                "--variant=minbase",
                "--include=ca-certificates",
                "bookworm",
                str(tree),
            ]
            subprocess.run(debootstrap, check=True, stdout=subprocess.DEVNULL, timeout=600)
            subprocess.run(["tar", "-C", str(tree), "-cf", str(partial), "."], check=True)
            partial.rename(archive)
    containers.docker("import", str(archive), BASE)
    return BASE


def _local_wheels() -> Path | None:
    """A folder pip looks in that has the CPU build of torch: PyTorch's own index may be out of
    reach.
    """
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for place in (os.environ.get("PIP_FIND_LINKS", "") + " " + configured).split():
        if any(Path(place).glob("torch-*+cpu-*.whl")):
            return Path(place)
    return None


@pytest.fixture(scope="session")
def build_environ(base_image: str) -> dict[str, str]:
    """The environment of a build.sh call on this machine."""
    environ = dict(os.environ) | {"BASE_IMAGE": base_image, "IMAGE": "nibble-test"}
    # A network behind a proxy of the host is not there inside a bridge network.
    environ |= {"NIBBLE_BUILD_NETWORK": os.environ.get("NIBBLE_BUILD_NETWORK", "host")}
    environ.pop("RUNTIME_IMAGE", None)
    if (wheels := _local_wheels()) is not None:
        environ["NIBBLE_BUILD_WHEELS"] = str(wheels)
    return environ


@pytest.fixture(scope="session")
def cpu_image(build_environ: dict[str, str]) -> str:
    """The CPU image, through ./build.sh as a user would."""
    command = [str(ROOT / "build.sh"), "cpu"]
    result = subprocess.run(
        command, env=build_environ, capture_output=True, text=True, timeout=1500, check=False
    )
    assert result.returncode == 0, f"build.sh cpu\n{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    return "nibble-test:cpu"
