"""`nibble rollback` with a real container engine: new containers have the build that it names.

Two empty images stand for builds; they have the tags that build.sh gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator

import pytest

from tests.support.docker.containers import client, docker

pytestmark = pytest.mark.docker
IMAGE = f"nibble-rollback-{os.getpid()}"
NAME = f"{IMAGE}:cpu"
LABEL = "org.opencontainers.image.version"


@pytest.fixture(scope="module")
def builds(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Ids of two builds, the earlier one first; NAME is the later one."""
    archive = tmp_path_factory.mktemp("builds") / "files.tar"
    ids = []
    for version in ("0.1.0", "0.2.0"):
        with tarfile.open(archive, "w") as files:
            files.addfile(tarfile.TarInfo(version))
        label = f"LABEL {LABEL}={version}"
        made = docker("import", "--change", label, "--change", "CMD /x", str(archive), NAME)
        ids.append(made.stdout.strip().removeprefix("sha256:"))
        docker("tag", NAME, f"{NAME}-{ids[-1][:12]}")
        time.sleep(1.1)  # legacy engines keep a second's precision
    yield ids
    docker("rmi", "--force", NAME, *(f"{NAME}-{one[:12]}" for one in ids))


def rollback(*words: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"IMAGE": IMAGE, "DOCKER": client() or "docker"}
    command = [sys.executable, "-m", "nibble", "rollback", "cpu", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def image_of_a_new_container() -> str:
    container = docker("create", NAME).stdout.strip()
    try:
        return json.loads(docker("inspect", container).stdout)[0]["Image"].removeprefix("sha256:")
    finally:
        docker("rm", container)


def test_a_new_container_has_the_build_before_and_the_later_one_comes_back(
    builds: list[str],
) -> None:
    earlier, later = builds
    listed = rollback("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [
        f"{NAME}-{later[:12]}",
        f"{NAME}-{earlier[:12]}",
    ]
    assert listed[0].endswith("0.2.0  current") and listed[1].endswith("0.1.0")
    assert image_of_a_new_container() == later
    done = rollback()
    assert done.returncode == 0, done.stderr
    assert f"{NAME} is cpu-{earlier[:12]} now (0.1.0" in done.stdout
    assert image_of_a_new_container() == earlier
    done = rollback()
    assert (done.returncode, done.stdout) == (5, "")
    assert "has no earlier build on this host" in done.stderr
    assert json.loads(rollback("--to", later[:12], "--json").stdout)["version"] == "0.2.0"
    assert image_of_a_new_container() == later


def test_an_unknown_build_and_an_engine_that_does_not_answer_are_named(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = rollback("--to", "cpu-0123456789ab")
    assert done.returncode == 2 and f"cpu-{builds[0][:12]}" in done.stderr
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    done = rollback()
    assert done.returncode == 5 and "check that the container engine runs" in done.stderr
    assert "Traceback" not in done.stderr


def test_build_sh_gave_the_image_a_tag_with_its_digest(cpu_image: str) -> None:
    found = json.loads(docker("image", "inspect", cpu_image).stdout)[0]
    digest = found["Id"].removeprefix("sha256:")[:12]
    assert f"{cpu_image}-{digest}" in found["RepoTags"]
