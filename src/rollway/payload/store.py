"""The stores for a rollout's columns, as the worker that writes them sees them. There are two.

*Files* (`SegmentWriter`) are for a worker, orchestrator and trainer that share a file system. *Frames*
(`FrameStore`) are for those that do not: a blob travels beside its Settled to the client, which writes
it to a segment. Readers find segments either way (`SegmentReader`).
"""

import asyncio
from typing import Protocol

from ..loop.lanes.lanes import thread_to_the_end
from ..records.payload import PayloadRef
from .blob import Blob, join


class PayloadStore(Protocol):
    """The worker's side. A ref is returned only once its bytes no longer need the rollout."""

    async def append(self, blob: Blob) -> PayloadRef:
        """Keep a blob; waits while the store is at its bound, PayloadError if it cannot."""
        ...

    def frame_of(self, ref: PayloadRef) -> memoryview | None:
        """The bytes that must travel with a ref, once; None if the ref is enough."""
        ...

    def taken(self, num_bytes: int) -> None:
        """The receiver has these bytes: as many may follow."""
        ...


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
    """Bounds the bytes under way to `limit`; first come, first served. A larger frame travels alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = asyncio.Lock()
        self._room = asyncio.Event()
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        async with self._lock:
            while self.num_bytes and self.num_bytes + num_bytes > self._limit:
                self._room.clear()
                await self._room.wait()
            self.num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._room.set()
