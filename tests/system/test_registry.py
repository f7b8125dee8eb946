"""build.sh --push, scripts/push.sh and --remote against a registry with TLS and a login, and a host
over ssh.

Small Dockerfiles stand in for the targets'; scripts, bake file, clients, engines, registry and
sshd are real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.docker import containers
from tests.support.docker import registry as registries
from tests.support.docker.plugins import docker_plugins
from tests.support.docker.registry import Registry
from tests.support.docker.second_engine import Engine, second_engine

pytestmark = pytest.mark.docker
PINNED = re.compile(r"\S+@sha256:[0-9a-f]{64}")


@dataclass
class Builder:
    """A checkout, a client and its settings, as one user has them on one machine."""

    folder: Path
    client: str
    environ: dict[str, str]
    image: str

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environ,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def docker(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(self.client, *words, check=check)

    def forget(self, *names: str) -> None:
        """Remove images and the cache of builds, so that a pull brings something."""
        self.docker("rmi", "--force", *names, check=False)


@pytest.fixture(scope="module")
def registry(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registries.registry(tmp_path_factory.mktemp("registry")) as made:
        yield made


@pytest.fixture(scope="module")
def modern(arm_emulated: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with second_engine(tmp_path_factory.mktemp("engine")) as made:
        yield made


def builder(
    folder: Path, registry: Registry, client: str, host: str | None, plugins: bool
) -> Builder:
    settings = folder / "docker-config"
    if plugins:
        docker_plugins(settings)
    settings.mkdir(exist_ok=True)
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "DOCKER": client}
    environ |= {"DOCKER_CONFIG": str(settings), "IMAGE": f"{registry.name}/nibble"}
    environ |= {"SSL_CERT_FILE": str(registry.authority)}
    if host:
        environ["DOCKER_HOST"] = host
    return Builder(registries.checkout(folder / "checkout"), client, environ, environ["IMAGE"])


@pytest.fixture(scope="module")
def classic(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Debian 12's client with BuildKit inside, and the machine's engine."""
    folder = tmp_path_factory.mktemp("classic")
    made = builder(folder, registry, containers.builder(), os.environ.get("DOCKER_HOST"), False)
    yield made
    # By number: an image that was pulled by digest has no tag.
    made.forget(*set(made.docker("images", "--quiet", made.image).stdout.split()))


@pytest.fixture(scope="module")
def bake(registry: Registry, modern: Engine, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """buildx, an engine with containerd's image store, and a scanner in the registry."""
    folder = tmp_path_factory.mktemp("bake")
    made = builder(folder, registry, modern.client, modern.host, True)
    assert registries.login(registry, made.client, made.environ) == 0
    scanner = f"{registry.name}/scanner:1"
    (made.folder / "Dockerfile.scanner").write_text(registries.SCANNER)
    (made.folder / "scan.sh").write_text(registries.SCAN)
    made.docker(
        "buildx", "build", "--file", "Dockerfile.scanner", "--tag", scanner,
        "--provenance=false", "--push", ".",
    )  # fmt: skip
    made.environ["SBOM_GENERATOR"] = scanner
    return made


def test_without_a_login_nothing_is_pushed(registry: Registry, classic: Builder) -> None:
    assert registries.login(registry, classic.client, classic.environ, "wrong") != 0
    refused = classic.run("./build.sh", "cpu", "--push", check=False)
    assert refused.returncode != 0 and "no basic auth credentials" in refused.stderr
    assert not PINNED.search(refused.stdout)


def test_an_unknown_authority_is_refused(registry: Registry, classic: Builder) -> None:
    shutil.rmtree(registry.trusted())
    try:
        refused = classic.run("scripts/push.sh", "cpu", check=False)
        assert refused.returncode != 0 and "certificate" in refused.stderr
    finally:
        registry.trusted()


def test_build_and_push_print_the_digest_that_pulls_back(
    registry: Registry, classic: Builder
) -> None:
    assert registries.login(registry, classic.client, classic.environ) == 0
    pushed = classic.run("./build.sh", "cpu", "--push").stdout.split()
    again = classic.run("scripts/push.sh", "cpu").stdout.split()
    assert pushed == again and PINNED.fullmatch(pushed[0])
    kept = classic.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    classic.forget(*[name for name in kept if name.startswith(classic.image)], pushed[0])
    assert classic.docker("image", "inspect", f"{classic.image}:cpu", check=False).returncode != 0
    classic.docker("pull", pushed[0])
    ran = classic.docker("run", "--rm", "--network", "none", pushed[0])
    assert ran.stdout.strip() == os.uname().machine


def test_push_names_an_image_that_was_not_built(classic: Builder) -> None:
    refused = classic.run("scripts/push.sh", "gb10", check=False)
    assert refused.returncode == 2 and "./build.sh gb10" in refused.stderr


def test_a_builder_that_cannot_push_several_platforms_is_told(
    registry: Registry, tmp_path: Path
) -> None:
    host = os.environ.get("DOCKER_HOST")
    made = builder(tmp_path, registry, containers.builder(), host, True)
    refused = made.run("./build.sh", "cpu", "--push", check=False)
    assert refused.returncode == 2 and "docker buildx create --use" in refused.stderr


@pytest.mark.usefixtures("arm")
def test_bake_pushes_two_platforms_with_sbom_and_provenance(bake: Builder) -> None:
    (pinned,) = bake.run("./build.sh", "cpu", "--push").stdout.split()
    assert PINNED.fullmatch(pinned)
    shown = json.loads(
        bake.docker("buildx", "imagetools", "inspect", f"{bake.image}:cpu", "--raw").stdout
    )
    parts = [one["platform"]["architecture"] for one in shown["manifests"]]
    assert sorted(parts) == ["amd64", "arm64", "unknown", "unknown"]
    digest = json.loads(_tells(bake, f"{bake.image}:cpu", "json .Manifest"))["digest"]
    assert digest == pinned.partition("@")[2]
    sbom = json.loads(_tells(bake, pinned, "json .SBOM"))
    provenance = json.loads(_tells(bake, pinned, "json .Provenance"))
    assert set(sbom) == set(provenance) == {"linux/amd64", "linux/arm64"}
    assert all(one["SPDX"]["name"] == "nibble-scan" for one in sbom.values())
    arguments = provenance["linux/arm64"]["SLSA"]["invocation"]["parameters"]["args"]
    assert arguments["build-arg:VLLM_FROM"] == "wheel"
    # The certificate reaches the build as a secret; provenance has its id alone.
    assert "BEGIN CERTIFICATE" not in json.dumps(provenance)


@pytest.mark.usefixtures("arm")
@pytest.mark.parametrize(("platform", "machine"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_each_platform_of_the_pushed_image_runs(bake: Builder, platform: str, machine: str) -> None:
    (pinned,) = bake.run("./build.sh", "cpu", "--push").stdout.split()
    words = ("run", "--rm", "--pull", "always", "--network", "none", "--platform")
    assert bake.docker(*words, f"linux/{platform}", pinned).stdout.strip() == machine


@pytest.mark.usefixtures("arm")
def test_a_target_for_arm_alone_is_pushed_from_another_machine(bake: Builder) -> None:
    (pinned,) = bake.run("./build.sh", "gb10", "--push").stdout.split()
    shown = json.loads(bake.docker("buildx", "imagetools", "inspect", pinned, "--raw").stdout)
    parts = [one["platform"]["architecture"] for one in shown["manifests"]]
    assert sorted(parts) == ["arm64", "unknown"]


def test_a_local_build_with_bake_has_one_platform_and_a_tag_by_digest(bake: Builder) -> None:
    printed = bake.run("./build.sh", "cpu").stdout.split()
    assert re.fullmatch(rf"{re.escape(bake.image)}:cpu-[0-9a-f]{{12}}", printed[-1])
    ran = bake.docker("run", "--rm", "--network", "none", printed[-1])
    assert ran.stdout.strip() == os.uname().machine


def _tells(bake: Builder, name: str, field: str) -> str:
    words = ("buildx", "imagetools", "inspect", name, "--format", f"{{{{{field}}}}}")
    return bake.docker(*words).stdout.strip()


SSH_HOST = """
FROM {base}
RUN apt-get update -q && apt-get install -qy --no-install-recommends openssh-server
RUN mkdir -p /run/sshd
CMD ["/usr/sbin/sshd", "-D", "-e", "-o", "PermitRootLogin=prohibit-password"]
"""


@pytest.fixture(scope="module")
def ssh_host(
    base_image: str, modern: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """HOST for --remote, and a folder whose ssh can log in: sshd beside the second engine."""
    folder = tmp_path_factory.mktemp("ssh")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True
    )
    (folder / "image").mkdir()
    (folder / "image/Dockerfile").write_text(SSH_HOST.format(base=base_image))
    words = ("build", "--quiet", "--network", "host", "--tag", "nibble-test-sshd")
    containers.docker(*words, str(folder / "image"), timeout=300)
    keys = folder / "authorized_keys"
    shutil.copy(folder / "key.pub", keys)
    keys.chmod(0o600)
    client = Path(modern.client).resolve()
    mounts = {modern.socket: "/var/run/docker.sock", client: "/usr/bin/docker"}
    options = [word for mount in mounts.items() for word in ("--volume", "{}:{}".format(*mount))]
    options += ["--volume", f"{keys}:/root/.ssh/authorized_keys:ro"]
    options += ["--publish", "127.0.0.1::22"]
    with containers.running("nibble-test-sshd", options=options) as container:
        port = containers.docker("port", container.id, "22/tcp").stdout.split()[0].split(":")[1]
        (folder / "config").write_text(
            f"Host second-host\n  HostName 127.0.0.1\n  Port {port}\n  User root\n"
            f"  IdentityFile {folder}/key\n  StrictHostKeyChecking no\n"
            f"  UserKnownHostsFile {folder}/known\n  LogLevel ERROR\n"
        )
        # ssh reads the account's home, not HOME: this one is first in PATH.
        (folder / "bin").mkdir()
        wrapper = folder / "bin/ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)
        yield "second-host", folder / "bin"
    containers.docker("rmi", "--force", "nibble-test-sshd", check=False)


@pytest.mark.parametrize("plugins", [False, True], ids=["classic", "buildx"])
def test_a_remote_build_leaves_the_image_on_the_other_host(
    registry: Registry, modern: Engine, ssh_host: tuple[str, Path], tmp_path: Path, plugins: bool
) -> None:
    host, programs = ssh_host
    made = builder(tmp_path, registry, containers.builder(), os.environ.get("DOCKER_HOST"), plugins)
    made.environ |= {
        "PATH": f"{programs}:{made.environ['PATH']}",
        "IMAGE": f"remote-{plugins}".lower(),
    }
    built = made.run("./build.sh", "cpu", "--remote", host)
    name = built.stdout.split()[-1]
    assert made.docker("image", "inspect", name, check=False).returncode != 0
    there = subprocess.run(
        [modern.client, "run", "--rm", "--network", "none", name],
        env={"DOCKER_HOST": modern.host}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert there.stdout.strip() == os.uname().machine


def test_a_remote_host_that_does_not_answer_is_one_error(
    registry: Registry, ssh_host: tuple[str, Path], tmp_path: Path
) -> None:
    _, programs = ssh_host
    made = builder(tmp_path, registry, containers.builder(), os.environ.get("DOCKER_HOST"), False)
    made.environ["PATH"] = f"{programs}:{made.environ['PATH']}"
    began = time.monotonic()
    refused = made.run("./build.sh", "cpu", "--remote", "127.0.0.1:9", check=False)
    assert refused.returncode == 2 and "no Docker engine answers" in refused.stderr
    assert time.monotonic() - began < 60
