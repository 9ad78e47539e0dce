"""Payload where no file system is shared: a blob becomes one raw frame beside its Settled.

Bounded in bytes: a worker has at most `window_bytes` on their way. A rollout that would go beyond waits
with its columns until the receiver has written earlier ones; it keeps its credit while it waits, so a
slow receiver slows down the worker, then the router, then the orchestrator.
"""

import asyncio

from ..loop.lanes import thread_to_the_end
from ..records.payload import PayloadRef
from .blob import Blob, join

ON_ITS_WAY = ""
"""The segment of a ref whose bytes travel beside it."""


class FrameStore:
    """Frames that wait to be sent, and the window they count against until they are taken."""

    def __init__(self, window_bytes: int) -> None:
        self._window = ByteWindow(window_bytes)
        self._frames: dict[int, memoryview] = {}
        self._next = 0

    async def append(self, blob: Blob) -> PayloadRef:
        """Make a frame as soon as the window has room for it."""
        await self._window.take(blob.length)
        try:
            frame = await thread_to_the_end(join, blob)
        except BaseException:  # cancelled, or out of memory
            self._window.give(blob.length)
            raise
        ref = PayloadRef(ON_ITS_WAY, self._next, blob.length)
        self._next += 1
        self._frames[ref.offset] = frame
        return ref

    def frame_of(self, ref: PayloadRef) -> memoryview | None:
        return self._frames.pop(ref.offset, None)

    def taken(self, num_bytes: int) -> None:
        self._window.give(num_bytes)


class ByteWindow:
    """Bytes under way, at most `limit`; first come, first served. More than the limit goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        async with self._turn:
            while self.num_bytes and self.num_bytes + num_bytes > self._limit:
                self._room.clear()
                await self._room.wait()
            self.num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._room.set()
