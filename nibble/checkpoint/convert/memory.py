"""Memory that is used again for one tensor after another.

Linux clears each new page, and a conversion would need new ones for every tensor: that takes longer
than to quantize it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any


class Memory:
    """Arrays of bytes by their size. Layers have tensors of few sizes, so what is held stays that
    of the tensors that are in work at a time.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int) -> Any:
        """An array of `size` bytes, uint8, with any contents."""
        import numpy

        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
        return numpy.empty(size, numpy.uint8)  # in huge pages, which numpy asks Linux for

    def give(self, arrays: Iterable[Any]) -> None:
        """Take arrays back that no thread reads any more."""
        with self._lock:
            for array in arrays:
                self._free[array.size].append(array)
