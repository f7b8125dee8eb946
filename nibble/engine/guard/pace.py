"""Passes heavy bodies to vLLM one at a time, so that the event loop serves others in between.

vLLM parses and validates a body in one step of the event loop, which takes some hundred ms for the
largest body. Without pauses, /health and running streams would wait for all bodies in a row.
"""

from __future__ import annotations

import asyncio

HEAVY_BYTES = 1 << 18
HEAVY_ITEMS = 2000  # keys, commas and opening brackets
HEAVY_SEQUENCES = 64
LEAST_PAUSE_S = 0.02
# The pause as a multiple of the step: applying the template and tokenizing take as long again.
PAUSE_PER_STEP = 4


class Pace:
    """Gives turns to the heavy bodies of one API process."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for a turn. The next turn begins after the following step of the event loop and a
        pause in proportion to it.
        """
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()

        def pause() -> None:
            loop.call_later(
                max(LEAST_PAUSE_S, PAUSE_PER_STEP * (loop.time() - began)), self._free.release
            )

        loop.call_soon(pause)
