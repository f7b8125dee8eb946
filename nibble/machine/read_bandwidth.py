"""The bandwidth at which this machine's cores read memory: what bounds a decode step on a CPU."""

from __future__ import annotations

import ctypes
import threading
import time

_BYTES = 512 << 20  # beyond the caches of every CPU that nibble was seen on
_PASSES = 4


def read_bandwidth(threads: int, size_bytes: int = _BYTES) -> float:
    """Bytes per second that `threads` threads read together; the fastest of a few passes.

    memchr is the C library's fastest reader (vector instructions), and ctypes releases the
    interpreter's lock while it runs.
    """
    share = size_bytes // threads
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
