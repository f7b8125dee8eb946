"""A machine for tests: a container whose first process is systemd.

It has its own cgroup v2 tree, as a booted machine has; where this host keeps the controllers in
cgroup v1, that tree has none, so limits of memory and processes have no effect there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.docker.containers import builder, client, docker
from tests.support.docker.images import CACHE

CGROUPS = Path("/sys/fs/cgroup")
PACKAGES = (
    "ca-certificates,systemd,systemd-sysv,dbus,podman,crun,netavark,aardvark-dns,passt,uidmap,"
    "nftables,iproute2,iptables,procps,curl"
)
# All but SYS_RESOURCE, which the engine of a test machine may lack itself.
OPTIONS = (
    "--cap-add", "ALL", "--cap-drop", "SYS_RESOURCE", "--device-cgroup-rule", "a *:* rwm",
    "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined",
    "--security-opt", "systempaths=unconfined", "--tmpfs", "/run", "--tmpfs", "/tmp:exec",
    "--device", "/dev/fuse", "--device", "/dev/net/tun",
)  # fmt: skip
_BOOT = """\
#!/bin/sh
set -eu
group=/cgroup2/nibble-test-$(hostname)
mkdir -p "$group"
echo $$ > "$group/cgroup.procs"
umount -R /sys/fs/cgroup
exec unshare --cgroup sh -c \
  'mount -t cgroup2 cgroup2 /sys/fs/cgroup && umount /cgroup2 && exec /lib/systemd/systemd'
"""
# A CDI device such as nvidia-ctk writes, for a machine without a GPU: it sets a variable.
_CDI = """\
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "all", "containerEdits": {"env": ["TEST_CDI_DEVICE=nvidia.com/gpu=all"]}}]}
"""
_DOCKERFILE = """\
FROM {base}
COPY boot /boot-machine
COPY cdi.json /etc/cdi/nvidia.json
COPY containers.conf /etc/containers/containers.conf.d/no-controllers.conf
USER root
RUN {setup}
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT []
CMD ["/boot-machine"]
"""


def cgroup2() -> Path | None:
    """Where cgroup v2 is mounted."""
    places = (CGROUPS, CGROUPS / "unified")
    return next((place for place in places if (place / "cgroup.controllers").exists()), None)


def debian13() -> str:
    """An image with Debian 13, systemd and Podman 5.4, made by debootstrap."""
    name = "nibble-test-base:trixie-podman"
    if docker("image", "inspect", name, check=False).returncode == 0:
        return name
    archive = CACHE / "base-trixie-podman.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            tree, partial = Path(folder) / "tree", Path(folder) / "base.tar"
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "trixie", tree]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
            leave_out = ("--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/*")
            subprocess.run(["tar", "-C", tree, *leave_out, "-cf", partial, "."], check=True)
            partial.rename(archive)
    docker("import", str(archive), name)
    archive.unlink()  # the engine has it now
    return name


def machine_image(name: str, base: str, setup: str) -> str:
    """An image on `base` that boots systemd; `setup` runs once as root. Layers are cached."""
    with tempfile.TemporaryDirectory() as folder:
        for file, text in (
            ("boot", _BOOT),
            ("cdi.json", _CDI),
            ("containers.conf", "[containers]\npids_limit = 0\n"),  # no controller of processes
            ("Dockerfile", _DOCKERFILE.format(base=base, setup=setup)),
        ):
            (Path(folder) / file).write_text(text)
        (Path(folder) / "boot").chmod(0o755)
        environ = os.environ | {"DOCKER_BUILDKIT": "1"}
        command = [builder(), "build", "--quiet", "--network", "host", "--tag", name, folder]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=600)
    return name


class Machine:
    """A booted machine. `run` is root's shell on it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(
        self, *words: str, check: bool = True, stdin: str | None = None, timeout: float = 300
    ) -> str:
        """The output of a command, without the last line break."""
        result = self.ask(*words, stdin=stdin, timeout=timeout)
        assert not check or result.returncode == 0, (
            f"{' '.join(words)}\n{result.stdout}\n{result.stderr}"
        )
        return result.stdout.rstrip("\n")

    def ask(
        self, *words: str, stdin: str | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        command = [*self.words(), *words]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )

    def words(self) -> list[str]:
        """What comes before a command on the host to run it on the machine: in the namespaces of
        systemd, which `docker exec` alone does not enter.
        """
        enter = ("nsenter", "--target", "1", "-m", "-u", "-i", "-n", "-p", "-C", "--")
        return [client() or "docker", "exec", "--interactive", self.name, *enter]

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path, stdin=text)

    def wait_until_booted(self) -> None:
        self.wait_for(lambda: self.run("true", check=False) == "", 30, "first process")
        # "degraded" is a unit that failed, which tests ask about by name.
        self.wait_for(
            lambda: (
                self.run("systemctl", "is-system-running", check=False)
                in ("running", "degraded", "starting")
            ),
            60,
            "systemd",
        )

    def wait_for(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, (
                f"{what}: not within {seconds:.0f} s\n{docker('logs', self.name).stdout}"
                f"{self.run('journalctl', '-n', '80', '--no-pager', check=False)}"
            )
            time.sleep(0.5)

    def property(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", unit, "--value", "--property", name)

    def journal(self, unit: str, since: str = "") -> list[str]:
        """Messages of a unit and of its container."""
        when = ("--since", since) if since else ()
        words = ("journalctl", "--unit", unit, "--output", "cat", "--no-pager", *when)
        return self.run(*words).splitlines()

    def now(self) -> str:
        """For `journal`; the journal's times have whole seconds here."""
        time.sleep(1)
        return self.run("date", "+%F %T")

    def reboot(self) -> None:
        """As `reboot` does: units are stopped in order."""
        docker("restart", "--time", "120", self.name, timeout=180)
        self.wait_until_booted()

    def lose_power(self) -> None:
        """Everything ends at once; then it boots again."""
        docker("kill", self.name)
        docker("start", self.name)
        self.wait_until_booted()


@contextlib.contextmanager
def booted(image: str, name: str, options: Sequence[str] = ()) -> Iterator[Machine]:
    """A machine of `image`, removed at the end with its disks."""
    place = cgroup2()
    assert place is not None, "no cgroup v2 is mounted here"
    mounts = ("--volume", f"{place}:/cgroup2")
    docker(
        "run", "--detach", "--name", name, "--hostname", name, *OPTIONS, *mounts, *options, image
    )  # fmt: skip
    try:
        machine = Machine(name)
        machine.wait_until_booted()
        yield machine
    finally:
        docker("rm", "--force", "--volumes", name)
        _remove_cgroups(place / f"nibble-test-{name}")


def _remove_cgroups(group: Path) -> None:
    folders = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
    for folder in [*folders, group]:
        with contextlib.suppress(OSError):
            folder.rmdir()
