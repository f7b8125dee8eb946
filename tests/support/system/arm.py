"""Programs for 64-bit Arm on this machine, by Debian's qemu-user-static.

The kernel starts them once it knows an interpreter (Linux's admin-guide/binfmt-misc.rst). Flag F
opens the interpreter at once, so it serves containers too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.debian import unpacked

BINFMT = Path("/proc/sys/fs/binfmt_misc")
NAME = "nibble-tests-aarch64"
# The first 20 bytes of an ELF file: 64 bits, little-endian, executable or shared, EM_AARCH64.
MAGIC = "7f454c460201010000000000000000000200b700"
MASK = "ffffffffffffff00fffffffffffffffffeffffff"


def runs_here() -> bool:
    """Whether this kernel starts Arm programs now."""
    if os.uname().machine == "aarch64":
        return True
    entries = BINFMT.iterdir() if BINFMT.is_dir() else ()
    return any(
        MAGIC in text and text.startswith("enabled")
        for text in (entry.read_text() for entry in entries if entry.name != "register")
    )


@contextlib.contextmanager
def emulation() -> Iterator[bool]:
    """Register QEMU with this kernel for a while, unless it starts Arm programs already.

    False where the kernel has no binfmt_misc or this user may not change it.
    """
    if runs_here():
        yield True
        return
    try:
        if not (BINFMT / "register").exists():
            subprocess.run(["mount", "-t", "binfmt_misc", "none", str(BINFMT)], check=True)
        tools = unpacked("qemu-user-bookworm", "bookworm", ("qemu-user-static",))
        escaped = (f"\\x{part[i : i + 2]}" for part in (MAGIC, MASK) for i in range(0, 40, 2))
        code = "".join(escaped)
        interpreter = tools / "usr/bin/qemu-aarch64-static"
        entry = f":{NAME}:M::{code[:80]}:{code[80:]}:{interpreter}:OCF"
        (BINFMT / "register").write_text(entry)
    except (OSError, subprocess.CalledProcessError):
        yield False
        return
    try:
        yield True
    finally:
        (BINFMT / NAME).write_text("-1")
