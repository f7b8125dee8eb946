"""The bandwidth at which this machine's cores read memory: what bounds a decode step on a CPU.

`nibble doctor` prints it. Each start of a server measures it too and keeps the largest for plans,
because other programs only take some of it.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from nibble.errors import NibbleError
from nibble.machine.cpus import ComputeCores
from nibble.machine.paths import cache_dir

_BYTES = 256 << 20  # beyond the caches of every CPU that nibble was seen on
_PASSES = 3
_FILE = "read_bandwidth.json"


def measure_and_store(cores: ComputeCores, environ: Mapping[str, str]) -> float:
    """The largest number of bytes per second so far, kept if nibble's cache can be written."""
    found = max(read_bandwidth(cores.threads), stored_bandwidth(cores, environ) or 0.0)
    try:
        path = _path(environ)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_of(cores) | {"bytes_per_s": round(found)}) + "\n")
    except (NibbleError, OSError):
        pass
    return found


def stored_bandwidth(cores: ComputeCores, environ: Mapping[str, str]) -> float | None:
    """Bytes per second that were measured on these cores, or None."""
    try:
        found = json.loads(_path(environ).read_text())
        same = all(found[name] == value for name, value in _of(cores).items())
        return float(found["bytes_per_s"]) or None if same else None
    except (NibbleError, OSError, ValueError, TypeError, KeyError):
        return None


def _path(environ: Mapping[str, str]) -> Path:
    return cache_dir(environ) / _FILE


def _of(cores: ComputeCores) -> dict[str, object]:
    """What a measurement holds for: another machine or cpuset may share the cache."""
    return {"cpus": list(cores.cpus), "threads": cores.threads, "processor": processor_line()}


def processor_line() -> str:
    """The line of /proc/cpuinfo that names the processor, or nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("model name", "CPU part"))), "")


def read_bandwidth(threads: int, size_bytes: int | None = None) -> float:
    """Bytes per second that `threads` threads read together; the fastest of a few passes.

    memchr is the C library's fastest reader (vector instructions), and ctypes releases the
    interpreter's lock while it runs.
    """
    share = (size_bytes or _BYTES) // threads
    blocks = [bytes([1]) * share for _ in range(threads)]  # written, so that each page exists
    find = ctypes.CDLL(None).memchr
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t)
    fastest = min(_pass(find, blocks, share) for _ in range(_PASSES))
    return share * threads / fastest


def _pass(find: ctypes._NamedFuncPointer, blocks: list[bytes], share: int) -> float:
    """Seconds until each block is read by a thread."""
    ready = threading.Barrier(len(blocks) + 1)

    def read(block: bytes) -> None:
        ready.wait()
        find(block, 2, share)

    readers = [threading.Thread(target=read, args=(block,)) for block in blocks]
    for reader in readers:
        reader.start()
    ready.wait()
    began = time.perf_counter()
    for reader in readers:
        reader.join()
    return time.perf_counter() - began
