"""Heavy bodies go to vLLM one at a time, and the event loop serves others in between.

vLLM parses and validates a body in one step of the event loop: some hundred ms for the largest that the limits
allow. Fifty of them in a row would be fifty such steps, and /health and running streams would wait for all.
"""

from __future__ import annotations

import asyncio

HEAVY_BYTES = 1 << 18
HEAVY_ITEMS = 2000
PAUSE_S = 0.02


class Pace:
    """The turns of one API process."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def turn(self) -> None:
        """Waits for its turn; the next comes PAUSE_S after the step of the event loop that follows."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_later, PAUSE_S, self._free.release)
