"""What a place for payload offers: to the worker that writes, to whoever reads.

Two exist. *Files* (`SegmentWriter`): worker, orchestrator and trainer share a file system. *Frames*
(`FrameStore`): they do not, and a blob travels beside its Settled to the client, which writes it to a
segment of its own. Either way readers find segments (`SegmentReader`).
"""

import asyncio
from typing import Protocol

from msgspec import Struct

from ..loop.lanes.lanes import thread_to_the_end
from ..records.payload import PayloadRef, frame_ref
from .blob import Blob, Columns, join


class Stored(Struct, frozen=True):
    """A blob's ref, and the raw frame that must travel with the ref if no file holds the bytes."""

    ref: PayloadRef
    frame: memoryview | None = None


class PayloadStore(Protocol):
    """The worker's side. A blob that is stored no longer needs the memory of its rollout."""

    async def store(self, blob: Blob) -> Stored:
        """Keep a blob. Wait while the store is at its bound; raise PayloadError if it cannot."""
        ...

    def taken(self, num_bytes: int) -> None:
        """The receiver has these bytes: as many may follow."""
        ...


class PayloadSource(Protocol):
    """The reader's side. A ref can be opened until its segment is removed."""

    def open(self, ref: PayloadRef) -> Columns:
        """The columns, as views."""
        ...

    def verify(self, ref: PayloadRef) -> None:
        """Raise PayloadError unless the bytes are those that were written."""
        ...

    def forget(self) -> None:
        """Let go of what is mapped."""
        ...

    def segments(self) -> list[str]:
        """The names of all segments there are."""
        ...

    def remove(self, segment: str) -> None:
        """Nobody will open a ref of this segment any more."""
        ...


class FrameStore:
    """Makes frames, which count against a window until their receiver has taken them."""

    def __init__(self, window_bytes: int) -> None:
        self._window = ByteWindow(window_bytes)

    async def store(self, blob: Blob) -> Stored:
        """Make a frame as soon as the window has room for it."""
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
