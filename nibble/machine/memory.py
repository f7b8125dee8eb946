"""Reads the available memory: one source for the budget before a start and for the watchdog.

It reads MemAvailable, not MemFree, because the kernel can reclaim the page cache (vllm#48140). A
cgroup with less memory left takes precedence.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nibble.machine.cgroups import cgroups

HOST = "MemAvailable"
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
_READ_BYTES = 1 << 16
_LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this machine, or of the cgroup with less.

    `limited_by` is "MemAvailable" or names the cgroup. `stalled_percent` is the share of the last
    ten seconds in which all tasks waited for memory (PSI "full avg10"); None if the kernel does not
    report it.
    """

    total_bytes: int
    available_bytes: int
    limited_by: str = HOST
    stalled_percent: float | None = None


class MemorySource:
    """Reads memory repeatedly through files that it opens once, so that a reading is cheap.

    `root` is the file system's root; tests pass a separate folder.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._meminfo = _File(root / "proc/meminfo")
        self._pressure = _File(root / "proc/pressure/memory")
        self._vmstat = _File(root / "proc/vmstat")
        self._cgroups = [_Cgroup(folder) for folder in cgroups("memory", _LIMITS, root)]

    def read(self) -> Memory:
        """The memory now. OSError if /proc/meminfo cannot be read."""
        fields = dict(re.findall(rb"^(\w+):\s+(\d+) kB", self._meminfo.read(), re.MULTILINE))
        total, available = int(fields[b"MemTotal"]) << 10, int(fields[b"MemAvailable"]) << 10
        limited_by, pressure = HOST, self._pressure
        for cgroup in self._cgroups:
            if (limit := cgroup.limit_bytes()) is None:
                continue
            total = min(total, limit)
            if (left := max(0, limit - cgroup.used_bytes())) < available:
                available, limited_by, pressure = left, f"cgroup {cgroup.folder}", cgroup.pressure
        return Memory(total, available, limited_by, _stalled_percent(pressure))

    def kernel_kills(self) -> int:
        """Kills by the kernel's OOM killer, in nibble's limited cgroups and anywhere; compare
        readings.
        """
        counts = [count for cgroup in self._cgroups if (count := cgroup.kernel_kills()) is not None]
        return sum(counts) + (_counter(self._vmstat, rb"oom_kill") or 0)

    def close(self) -> None:
        """Close the files."""
        for file in (self._meminfo, self._pressure, self._vmstat):
            file.close()
        for cgroup in self._cgroups:
            cgroup.close()


def memory_now() -> Memory:
    """One reading."""
    source = MemorySource()
    try:
        return source.read()
    finally:
        source.close()


class _Cgroup:
    """The memory files of one cgroup, v2 or v1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v2 = (folder / "memory.max").exists()
        names = (
            ("memory.max", "memory.high", "memory.current", "memory.events")
            if self._is_v2
            else ("memory.limit_in_bytes", "", "memory.usage_in_bytes", "memory.oom_control")
        )
        self._limit, self._high, self._usage, self._events = (
            _File(folder / name) for name in names
        )
        self._stat = _File(folder / "memory.stat")
        self.pressure = _File(folder / "memory.pressure")

    def limit_bytes(self) -> int | None:
        """memory.max, or a lower memory.high, above which the kernel throttles."""
        limits = [
            number for file in (self._limit, self._high) if (number := _number(file)) is not None
        ]
        return min(limits, default=None)

    def used_bytes(self) -> int:
        """Use without what the kernel reclaims before it refuses memory.

        That is the inactive page cache and half of the active one: a mapped checkpoint that was
        read twice is active.
        """
        prefix = b"" if self._is_v2 else b"total_"
        stat = self._stat.read()
        inactive, active = (
            _field(stat, prefix + name) for name in (b"inactive_file", b"active_file")
        )
        return max(0, (_number(self._usage) or 0) - inactive - active // 2)

    def kernel_kills(self) -> int | None:
        return _counter(self._events, rb"oom_kill") if self.limit_bytes() is not None else None

    def close(self) -> None:
        for file in (self._limit, self._high, self._usage, self._events, self._stat, self.pressure):
            file.close()


class _File:
    """A small file of the kernel, read from its start each time; empty if absent."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> bytes:
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, _READ_BYTES, 0)
        except OSError:  # the cgroup is gone, or pressure accounting is switched off
            return b""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _number(file: _File) -> int | None:
    """The number in a file; None for "max", for v1's huge "no limit" and for no file."""
    text = file.read().strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _counter(file: _File, name: bytes) -> int | None:
    text = file.read()
    return _field(text, name) if text else None


def _field(text: bytes, name: bytes) -> int:
    match = re.search(rb"^" + name + rb" (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _stalled_percent(file: _File) -> float | None:
    match = re.search(rb"^full avg10=([\d.]+)", file.read(), re.MULTILINE)
    return float(match[1]) if match else None
