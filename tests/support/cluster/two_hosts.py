"""Two hosts on one machine, for nodes of a cluster as processes: two sets of namespaces with a
cable between them.

Each has a separate address, host name, mounts and shared memory, and reaches the other alone.
Made without root where user namespaces are allowed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.paths import CLUSTER_PLATFORM, ROOT
from tests.support.servers.serving import clean_environ

ADDRESSES = ("10.89.8.1", "10.89.8.2")
TOKEN = secrets.token_hex(16)
# An outer namespace has the capabilities; the hosts are two namespaces in it.
OUTER = ("unshare", "--user", "--map-root-user", "--net", "--mount")
HOLD = """
set -e
for n in 1 2; do
  unshare --net --mount --uts bash -e -c 'hostname host'$n'
    mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; mount -t tmpfs -o size=1g tmpfs /dev/shm
    echo host'$n' $$; exec sleep 3600' &
done
echo outer $$
sleep 3600
"""
CABLE = """
set -e
ip link add eth0 netns {0} type veth peer name eth0 netns {1}
for host in "{0} {2}" "{1} {3}"; do
  set -- $host
  nsenter --net --target $1 sh -e -c "ip addr add $2/24 dev eth0; ip link set eth0 up; ip link set lo up"
done
"""  # noqa: E501
COMMON = {
    "NIBBLE_CLUSTER_TOKEN": TOKEN,
    "NIBBLE_CLUSTER_WAIT_SECONDS": "60",
    "NIBBLE_KV_CACHE_BYTES": str(64 << 20),
    "NIBBLE_MEMORY_RESERVE_GIB": "0",
    "NIBBLE_ALLOW_ANONYMOUS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HEAD_IP": ADDRESSES[0],
    "PORT": "8000",
    "NIBBLE_CONTROL_PORT": "8001",
}


class Process:
    """The entry point on a host; its output in a file."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=out, stderr=out)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_said(self, words: str, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.said():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()[-4000:]
            time.sleep(0.1)

    def wait(self, seconds: float = 90.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds} s:\n{self.said()[-4000:]}"
            ) from None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def into(outer: int) -> list[str]:
    """The words that start a command in the outer namespaces of process `outer`."""
    return [
        "nsenter",
        "--user",
        "--net",
        "--mount",
        "--preserve-credentials",
        "--target",
        str(outer),
    ]


class Host:
    """One of the two; `outer` is the process in the namespace that has the rights, `pid` the one in
    the host's namespaces.
    """

    def __init__(self, outer: int, pid: int, address: str) -> None:
        self._enter = [*into(outer), "nsenter", "--net", "--mount", "--uts", "--target", str(pid)]
        self.address = address

    def start(self, folder: Path, *words: str, **environ: str) -> Process:
        """The entry point with `words`; `folder` gets its caches and its log."""
        folder.mkdir(parents=True, exist_ok=True)
        given = clean_environ(folder, **{**COMMON, "WORKER_IP": self.address, **environ})
        given["PYTHONPATH"] = os.pathsep.join(
            filter(None, [environ.get("PYTHONPATH"), str(CLUSTER_PLATFORM)])
        )
        command = [*self._enter, str(ROOT / "entrypoint.sh"), *words]
        return Process(command, given, folder / f"{words[0]}.log")

    def mount(self, source: Path, target: Path) -> None:
        """`source` at `target`, on this host alone."""
        subprocess.run(
            [*self._enter, "mount", "--bind", str(source), str(target)], check=True, timeout=20
        )

    def unmount(self, target: Path) -> None:
        subprocess.run([*self._enter, "umount", str(target)], check=True, timeout=20)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Raises OSError where namespaces may not be made."""
    holder = subprocess.Popen([*OUTER, "bash", "-c", HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        said = [holder.stdout.readline().split() for _ in range(3)]
        if not all(said):
            raise OSError("no namespaces may be made here")
        pids = {name: int(pid) for name, pid in said}
        outer, first, second = pids["outer"], pids["host1"], pids["host2"]
        enter = [
            *into(outer),
            "bash",
            "-c",
        ]
        cable = CABLE.format(first, second, *ADDRESSES)
        done = subprocess.run(
            [*enter, cable], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            raise OSError(f"no network between namespaces may be made here: {done.stderr.strip()}")
        yield Host(outer, first, ADDRESSES[0]), Host(outer, second, ADDRESSES[1])
    finally:
        for child in _children(holder.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
        holder.kill()
        holder.wait()


def _children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in listed.read_text().split()] if listed.exists() else []
    return found + [inner for child in found for inner in _children(child)]
