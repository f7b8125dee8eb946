"""madvise: what a program tells Linux about its memory."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


def madvise(address: int, size_bytes: int, advice: int) -> bool:
    """Whether Linux took the advice. Releases the interpreter's lock."""
    return _function()(address, size_bytes, advice) == 0


@functools.cache
def _function() -> Any:
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
