"""Memory for the bodies of replies: as many large ones at a time as a loop can take."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .body import Spool
from .http import Reply

INLINE_BODY_BYTES = 64 << 10
"""Bodies up to this size are read as they come."""
MAX_LARGE_BODIES = 2
"""Large bodies read at a time; the others wait in the kernel. Bursts, not sums, make a loop late."""


class Spools:
    """What all engines of a process share."""

    def __init__(self) -> None:
        self._free: asyncio.LifoQueue[Spool] = asyncio.LifoQueue()
        for _ in range(MAX_LARGE_BODIES):
            self._free.put_nowait(Spool())

    @asynccontextmanager
    async def taken_for(self, reply: Reply) -> AsyncIterator[Spool]:
        """Memory of its own for a small body; a large one waits for a place."""
        length = reply.head.length
        if length is not None and length <= INLINE_BODY_BYTES:
            yield Spool(length)
            return
        spool = await self._free.get()
        try:
            spool.reserve(length or 0)
            yield spool
        finally:
            spool.clear()
            self._free.put_nowait(spool)
