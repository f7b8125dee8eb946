"""Frames between the API process and the grammar worker: a length, then marshalled data."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!I")
# From version 3 on, equal objects can have different bytes; the bytes of a request are the key of
# the cache of results.
MARSHAL_VERSION = 2


def packed(value: Any) -> bytes:
    """The frame of one value."""
    data = marshal.dumps(value, MARSHAL_VERSION)
    return _LENGTH.pack(len(data)) + data


def unpacked(received: bytearray) -> Iterator[Any]:
    """The values of all whole frames, which are removed from `received`."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        data = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield marshal.loads(data)
