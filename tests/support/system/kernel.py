"""A User-mode Linux kernel with what Debian's lacks: pressure stall information and soft RoCE.

It is compiled once from Debian's package linux-source-6.12, with this machine's compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.support.debian import unpack
from tests.support.docker.images import CACHE
from tests.support.once import locked

SOURCE = "linux-source-6.12"
TOOLS = ("flex", "bison", "bc", "make", "gcc")
CONFIG = """\
PSI MEMCG SWAP CGROUPS HOSTFS TMPFS TMPFS_XATTR DEVTMPFS NAMESPACES USER_NS UML_NET_VECTOR INET
NETDEVICES UML_PCI_OVER_VIRTIO VIRTIO_UML INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_ADDR_TRANS
RDMA_RXE HIGH_RES_TIMERS NO_HZ_IDLE POSIX_MQUEUE AIO MEMBARRIER DEBUG_INFO_NONE OVERLAY_FS IPV6
""".split()
WITHOUT = "MODULES SOUND UML_SOUND DRM MEDIA_SUPPORT HWMON REISERFS_FS USB_SUPPORT".split()
# Sources that no User-mode Linux has; their Kconfig files are needed.
_UNUSED = re.compile(
    r"^[^/]+/(Documentation/|tools/testing/"
    r"|(drivers/(gpu|media|staging|net/(ethernet|wireless))|sound)/.*\.[ch]$"
    r"|arch/(?!um/|x86/|Kconfig))"
)
_MISSING = re.compile(r"can't open file \"([^\"]+)\"")


def built_kernel() -> Path:
    """The kernel's program; about six minutes of two cores, once."""
    kernel = CACHE / f"uml-{SOURCE.rpartition('-')[2]}"
    with locked(kernel):
        if not kernel.exists():
            _install_tools()
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                _unpack(Path(folder))
                _configure(Path(folder))
                _make(Path(folder), f"-j{os.cpu_count()}", "linux")
                shutil.copy(Path(folder) / "linux", kernel.with_suffix(".new"))
            kernel.with_suffix(".new").rename(kernel)
    return kernel


def _install_tools() -> None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
        subprocess.run(command, check=True, capture_output=True)


def _unpack(folder: Path) -> None:
    unpack(folder / "package", "trixie", [SOURCE])
    (archive,) = (folder / "package").rglob("linux-source-*.tar.xz")
    with tarfile.open(archive) as source:
        for entry in source:
            if not _UNUSED.match(entry.name) and "/" in entry.name:
                entry.name = entry.name.partition("/")[2]
                if entry.islnk():
                    entry.linkname = entry.linkname.partition("/")[2]
                source.extract(entry, folder, filter="tar")
    shutil.rmtree(folder / "package")


def _configure(folder: Path) -> None:
    """Debian's and our options; an absent Kconfig file of another architecture is empty."""
    for _ in range(60):
        missing = _MISSING.search(_make(folder, "defconfig", check=False))
        if missing is None:
            break
        file = folder / missing[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    lines = [f"CONFIG_{name}=y" for name in CONFIG] + [f"CONFIG_{name}=n" for name in WITHOUT]
    with (folder / ".config").open("a") as config:
        config.write("\n".join(lines) + "\n")
    _make(folder, "olddefconfig")
    made = (folder / ".config").read_text()
    assert "CONFIG_PSI=y" in made and "CONFIG_RDMA_RXE=y" in made and "CONFIG_MEMCG=y" in made


def _make(folder: Path, *words: str, check: bool = True) -> str:
    result = subprocess.run(
        ["nice", "make", "ARCH=um", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not check or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr
