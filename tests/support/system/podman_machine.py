"""A Debian 13 with Podman: images by `podman_image`, the slow model, and port 8000 on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.docker.containers import docker
from tests.support.docker.images import CACHE
from tests.support.models.slow_model import make_slow_model
from tests.support.servers.serving import free_port
from tests.support.system import podman_image
from tests.support.system.machine import Machine, booted, debian13, machine_image

SLOW_MODEL = "/slow-model"  # on the machine


@dataclass
class PodmanMachine:
    """A machine, the port of this host that reaches its 8000, and the volume of its images."""

    machine: Machine
    port: int
    volume: str

    def give(self, source: str, name: str, created: str, **env: str) -> None:
        """Make `source` of this host's engine the image `name`, with more variables."""
        podman_image.give(self.machine, self.volume, source, name, created, **env)


@contextmanager
def podman_machine(name: str, setup: str = "true") -> Iterator[PodmanMachine]:
    """`setup` is a shell command of its image."""
    image = machine_image(f"nibble-test-machine:{name}", debian13(), setup)
    port, volume = free_port(), docker("volume", "create").stdout.strip()
    slow = make_slow_model(CACHE / "slow-model")
    options = [
        "--volume", f"{volume}:{podman_image.STORAGE}", "--volume", f"{slow}:{SLOW_MODEL}:ro",
        "--publish", f"127.0.0.1:{port}:8000",
    ]  # fmt: skip
    try:
        with booted(image, name, options) as machine:
            yield PodmanMachine(machine, port, volume)
    finally:
        docker("volume", "rm", "--force", volume)
