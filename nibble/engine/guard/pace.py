"""Heavy bodies go to vLLM one at a time, and the event loop serves others in between.

vLLM parses and validates a body in one step of the event loop: some hundred ms for the largest that
the limits allow. Fifty of them in a row would be fifty such steps, and /health and running streams
would wait for all.
"""

from __future__ import annotations

import asyncio

HEAVY_BYTES = 1 << 18
HEAVY_ITEMS = 2000  # keys, commas and opening brackets
HEAVY_SEQUENCES = 64
LEAST_PAUSE_S = 0.02
PAUSE_PER_STEP = (
    4  # what vLLM does next with such a body (its template, its tokens) takes as long again
)


class Pace:
    """The turns of one API process."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def turn(self) -> None:
        """Waits for its turn; the next comes after the step of the event loop that follows, and
        a pause in proportion.
        """
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()

        def pause() -> None:
            loop.call_later(
                max(LEAST_PAUSE_S, PAUSE_PER_STEP * (loop.time() - began)), self._free.release
            )

        loop.call_soon(pause)
