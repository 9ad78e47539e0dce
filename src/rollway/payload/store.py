"""The stores for a rollout's columns, as the worker that writes them sees them. There are two.

*Files* (`SegmentWriter`) are for a worker, orchestrator and trainer that share a file system. *Frames*
(`FrameStore`) are for those that do not: a blob travels beside its Settled to the client, which writes
it to a segment. Readers find segments either way (`SegmentReader`).
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from ..loop.lanes.threads import thread_to_the_end
from ..records.payload import PayloadRef, frame_ref
from .blob import Column, build, join
from .spool import Spool


class Stored(Struct, frozen=True):
    """A blob's ref, and the raw frame that must travel with the ref if no file holds the bytes."""

    ref: PayloadRef
    frame: memoryview | None = None


class PayloadStore(Protocol):
    """The worker's side. Columns that are stored no longer need the memory of their rollout."""

    def new_spool(self) -> Spool | None:
        """Return a place for the routes of a rollout that begins. None keeps them in memory."""

    async def store(self, columns: Mapping[str, Column], spool: Spool | None) -> Stored:
        """Keep a rollout's columns. Wait while the store is at its bound; raise PayloadError if it
        cannot."""

    def taken(self, num_bytes: int) -> None:
        """The receiver has these bytes: as many may follow."""


class FrameStore:
    """Makes frames, which count against a window until their receiver has taken them."""

    def __init__(self, window_bytes: int) -> None:
        self._window = ByteWindow(window_bytes)

    def new_spool(self) -> None:
        """Keep routes in memory, where frames are, too."""

    async def store(
        self, columns: Mapping[str, Column], spool: Spool | None = None
    ) -> Stored:
        blob = build(columns)
        await self._window.take(blob.length)
        try:
            frame = await thread_to_the_end(join, blob)
        except BaseException:  # cancelled, or out of memory
            self._window.give(blob.length)
            raise
        return Stored(frame_ref(blob.length), frame)

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
