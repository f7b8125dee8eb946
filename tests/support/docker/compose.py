"""The shipped Compose files, brought up by Compose in a copy of their folder with test secrets."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.docker.containers import Container, client
from tests.support.docker.plugins import docker_plugins
from tests.support.docker.served_containers import KEY
from tests.support.paths import ROOT
from tests.support.servers.serving import free_port

CLUSTER_TOKEN = "0123456789abcdef" * 4


@dataclass
class Project:
    """One Compose project: `words` go before the verb, `environ` is the user's shell."""

    name: str
    folder: Path
    environ: dict[str, str]
    files: list[str] = field(default_factory=lambda: ["docker/compose.yaml"])
    profiles: tuple[str, ...] = ("cpu",)

    def command(self, *words: str) -> list[str]:
        files = [word for file in self.files for word in ("-f", file)]
        profiles = [word for profile in self.profiles for word in ("--profile", profile)]
        return [client() or "docker", "compose", "-p", self.name, *files, *profiles, *words]

    def run(
        self, *words: str, check: bool = True, timeout: float = 300, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        said = f"{result.stdout}\n{result.stderr}"
        assert not check or result.returncode == 0, f"compose {' '.join(words)}\n{said}"
        return result

    def override(self, name: str, text: str) -> None:
        """A further file for -f, as a user would write it."""
        (self.folder / name).write_text(text)
        self.files.append(name)

    def container(self, service: str = "cpu") -> Container:
        return Container(self.run("ps", "--all", "--quiet", service).stdout.strip())


@contextlib.contextmanager
def project(folder: Path, name: str, image: str, **environ: str) -> Iterator[Project]:
    """A project of the shipped files with `image` as NAME:TAG, removed with its volumes."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "docker", folder / "docker")
    secrets = folder / "docker/secrets"
    secrets.mkdir()
    for secret, text in {"hf_token": "", "api_key": KEY, "cluster_token": CLUSTER_TOKEN}.items():
        (secrets / secret).write_text(text)
        (secrets / secret).chmod(0o440)
    repository, _, tag = image.rpartition(":")
    plugins = docker_plugins(folder / "docker-config")
    # A user's shell without what this session has set.
    shell: Mapping[str, str] = {
        key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "DOCKER_HOST")
    }
    values = {"IMAGE": repository, "TAG": tag, "DOCKER_CONFIG": str(plugins)}
    made = Project(name, folder, {**shell, **values, "PORT": str(free_port()), **environ})
    try:
        yield made
    finally:
        made.run("down", "--volumes", "--timeout", "5", "--remove-orphans", check=False)
