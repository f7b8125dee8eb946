"""Another Docker engine beside the machine's: Debian 13's, with containerd's image store.

It builds for several platforms with attestations, as today's Docker does, and stands for a second
host. It runs from unpacked packages, with a separate bridge and separate data.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import unpacked

PACKAGES = ("docker.io", "docker-cli", "containerd")
ADDRESS = "10.89.9.1/24"
_START_S = 60


@dataclass
class Engine:
    """`programs` holds its client; `socket` is where it answers."""

    socket: Path
    programs: Path

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    @property
    def client(self) -> str:
        return str(self.programs / "docker")


@contextlib.contextmanager
def second_engine(folder: Path) -> Iterator[Engine]:
    """Started with its data in `folder`, ended and removed at the end."""
    tree = unpacked("docker-engine-trixie", "trixie", PACKAGES)
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for place in ("usr/bin", "usr/sbin"):
        for program in (tree / place).iterdir():
            # Its runc needs a newer C library than Debian 12's.
            if program.name != "runc":
                (programs / program.name).symlink_to(program)
    # Sockets have a limit of about 100 letters for their paths.
    short = Path(f"/run/nibble-{secrets.token_hex(4)}")
    short.mkdir()
    bridge = f"nib-{secrets.token_hex(4)}"
    configuration = {
        "features": {"containerd-snapshotter": True},
        "bridge": bridge,
        "iptables": False,
        "data-root": str(folder / "data"),
        "exec-root": str(short / "exec"),
        "pidfile": str(short / "pid"),
        "hosts": [f"unix://{short}/docker.sock"],
    }
    (folder / "daemon.json").write_text(json.dumps(configuration))
    for step in (
        f"link add {bridge} type bridge",
        f"addr add {ADDRESS} dev {bridge}",
        f"link set {bridge} up",
    ):
        subprocess.run(["ip", *step.split()], check=True)
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    environ.pop("SSL_CERT_FILE", None)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [programs / "dockerd", "--config-file", folder / "daemon.json"],
            env=environ, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    engine = Engine(short / "docker.sock", programs)
    try:
        _wait(engine, server, folder / "log")
        yield engine
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        subprocess.run(["ip", "link", "del", bridge], check=False)
        shutil.rmtree(short, ignore_errors=True)
        shutil.rmtree(folder / "data", ignore_errors=True)


def _wait(engine: Engine, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        asked = subprocess.run(
            [engine.client, "version"],
            env={"DOCKER_HOST": engine.host, "HOME": "/nonexistent"},
            capture_output=True,
            check=False,
        )
        if asked.returncode == 0:
            return
        time.sleep(0.2)
