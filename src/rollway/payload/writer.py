"""Appends blobs to segment files in the thread lane, with vectored writes and without joining them."""

import asyncio
import errno
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from ..errors import PayloadError
from ..loop.lanes.threads import thread_to_the_end
from ..records.payload import PayloadRef, SegmentName
from .blob import Blob, Buffer, check_data, relabel, seal
from .segment import OpenSegment
from .store import Stored

Durability = Literal["process", "host"]
Parts = Callable[[str], Sequence[Buffer]]
"""Returns the bytes of a blob for the segment of this name."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SegmentWriter:
    """Writes one process's segments, one after the other. `first` is the name of the first one.

    A ref is returned only after its bytes are written: to the kernel, so that they survive the death of
    this process, or with durability `host` to the disk, so that they survive a power failure. A segment
    is closed once it holds `segment_bytes`; a reader may then remove it, and its file is reused. An
    append that fails changes nothing that was written before, and the next append may succeed.
    """

    def __init__(
        self,
        folder: Path,
        first: SegmentName,
        segment_bytes: int,
        durability: Durability = "process",
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._durable = durability == "host"
        self._next = first
        self._segment: OpenSegment | None = None
        self._lock = asyncio.Lock()

    async def append(self, blob: Blob) -> PayloadRef:
        """Write a blob to the current segment, or to a new one if that is full."""
        return await self._append(partial(seal, blob), blob.length)

    async def append_frame(self, frame: memoryview) -> PayloadRef:
        """Write a blob that another process sealed, if its checksum is right."""
        return await self._append(partial(_check_and_relabel, frame), len(frame))

    async def store(self, blob: Blob) -> Stored:
        return Stored(await self.append(blob))

    def taken(self, num_bytes: int) -> None:
        """Do nothing: no append waits for the receiver, because the bytes are in a file."""

    async def _append(self, parts: Parts, length: int) -> PayloadRef:
        async with self._lock:
            try:
                return await thread_to_the_end(self._commit, parts, length)
            except OSError as error:
                raise PayloadError(self._explain(error, length)) from None

    def _commit(self, parts: Parts, length: int) -> PayloadRef:
        """Do the whole append in one call of the thread lane. The lock lets only one run at a time."""
        segment = self._segment
        if segment is None or not segment.is_sound or segment.end >= self._segment_bytes:
            segment = self._rotate()
        offset = segment.append(parts(segment.path.name))
        return PayloadRef(segment.path.name, offset, length)

    def _rotate(self) -> OpenSegment:
        """Begin a new segment. Files that a writer of the same name left are not touched."""
        self.close()
        while (path := self._folder / str(self._next)).exists():
            self._next = self._next.following()
        self._segment = OpenSegment(path, durable=self._durable)
        self._next = self._next.following()
        return self._segment

    def close(self) -> None:
        """End the current segment; the next append begins a new one."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _explain(self, error: OSError, length: int) -> str:
        where = error.filename or (self._segment.path if self._segment else self._folder)
        problem = f"cannot write {length} bytes to {where}: {error.strerror or error}"
        if error.errno in _FULL:
            return f"{problem}; make room there and rollouts continue (earlier payload is intact)"
        return f"{problem}; check that the folder exists, is writable and on a healthy disk"

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_and_relabel(frame: memoryview, segment: str) -> Sequence[Buffer]:
    check_data(frame)
    return relabel(frame, segment)
