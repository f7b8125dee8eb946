"""Another Linux kernel on this machine: User-mode Linux, a kernel as a process of this one.

Its root is this machine's file system, read-only; what a test writes is in memory. So a guest runs
programs of this checkout with a kernel that has cgroup v2 with its memory controller and swap,
whatever the machine's own kernel has.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import unpacked
from tests.support.paths import ROOT

# The guest's memory is many small maps of one file.
MAPS, MAPS_FILE = 8_000_000, Path("/proc/sys/vm/max_map_count")
_INIT = """\
#!/bin/bash
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t hostfs -o {share} none /mnt
for place in /tmp /run /dev/shm; do mkdir -p $place; mount -t tmpfs -o size=8g tmpfs $place; done
mkdir -p /dev/pts
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
export PATH={python}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/tmp/home TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1
mkdir $HOME
ip link set lo up 2>/dev/null || python -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 0x49))'
if [ -b /dev/ubda ]; then mkswap /dev/ubda >/dev/null && swapon /dev/ubda; fi
cd {root}
( {command} ) >/mnt/output 2>&1 </dev/null
echo $? >/mnt/exit
sync
python -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'
"""


@dataclass(frozen=True)
class Ended:
    """A guest that is over. `code` is its command's exit code."""

    code: int
    output: str


def debian_kernel() -> Path:
    """The kernel of Debian 12's package user-mode-linux."""
    return unpacked("user-mode-linux", "bookworm", ["user-mode-linux"]) / "usr/bin/linux.uml"


@contextlib.contextmanager
def many_maps() -> Iterator[None]:
    """Lets a process have as many maps as a guest needs; the limit is given back."""
    before = int(MAPS_FILE.read_text())
    MAPS_FILE.write_text(str(max(before, MAPS)))
    try:
        yield
    finally:
        MAPS_FILE.write_text(str(before))


def run_in_guest(
    kernel: Path,
    folder: Path,
    words: Sequence[str],
    memory_mib: int,
    swap_mib: int = 0,
    seconds: float = 600,
    options: Sequence[str] = (),
) -> Ended:
    """Boot, run `words` in the checkout as root, power off. `folder` is /mnt in the guest."""
    process = start_guest(kernel, folder, words, memory_mib, swap_mib, options)
    return wait_for_guest(process, folder, seconds)


def start_guest(
    kernel: Path,
    folder: Path,
    words: Sequence[str],
    memory_mib: int,
    swap_mib: int = 0,
    options: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """The guest's process. The kernel's messages are the file `console` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    init = folder / "init"
    values = {"share": folder, "python": Path(sys.executable).parent, "root": ROOT}
    init.write_text(_INIT.format(command=shlex.join(words), **values))
    init.chmod(0o755)
    command = [
        str(kernel), f"mem={memory_mib}M", "root=/dev/root", "rootfstype=hostfs", "hostfs=/", "ro",
        f"init={init}", "con=null", "con0=null,fd:1", "ssl=null", "quiet", "panic=1", *options,
    ]  # fmt: skip
    if swap_mib:
        swap = folder / "swap"
        with swap.open("wb") as file:
            file.truncate(swap_mib << 20)
        command.append(f"ubd0={swap}")
    with (folder / "console").open("wb") as console:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": "/dev/shm"},
            pass_fds=pass_fds,
            start_new_session=True,  # a guest is several processes
        )


def wait_for_guest(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> Ended:
    """Until it has powered off."""
    output = folder / "output"
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        end_guest(process)
        seen = f"{_text(folder / 'console')}\n{_text(output)}"
        raise AssertionError(f"the guest ran longer than {seconds:.0f} s\n{seen}") from None
    code = _text(folder / "exit").strip()
    assert code, f"the guest ended early\n{_text(folder / 'console')}\n{_text(output)}"
    return Ended(int(code), _text(output))


def end_guest(process: subprocess.Popen[bytes]) -> None:
    """For a guest that does not power off."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace")[-20_000:] if path.exists() else ""
