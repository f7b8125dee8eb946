"""Values between the API process and the grammar worker: a length, then marshal."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!I")
# From version 3 on equal objects can have different bytes, and the bytes of a request are what it
# is remembered by.
MARSHAL_VERSION = 2


def packed(value: Any) -> bytes:
    """One value, ready to be sent."""
    data = marshal.dumps(value, MARSHAL_VERSION)
    return _LENGTH.pack(len(data)) + data


def unpacked(received: bytearray) -> Iterator[Any]:
    """The values that have come whole, taken out of `received`."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        data = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield marshal.loads(data)
