"""Appends blobs to segment files in the thread lane, with vectored writes and without joining them."""

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from ..errors import PayloadError
from ..loop.lanes.threads import thread_to_the_end
from ..records.payload import PayloadRef, SegmentName
from ..records.turn import Routes, SpooledRoutes
from .blob import Blob, Buffer, Column, build, build_behind, check_data, relabel, seal
from .segment import OpenSegment, become_segment
from .spool import HEAD_BYTES, Spool, Spooler
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
        spool_bytes: int = 1 << 20,
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._durable = durability == "host"
        self._next = first
        self._next_whole = structs.replace(first, writer=f"{first.writer}.whole")
        """The next segment that was a spool. These have an order of their own, because a writer never
        returns to an older segment."""
        self._num_spools = 0
        self._spool_bytes = spool_bytes
        self._spooler = Spooler()
        self._segment: OpenSegment | None = None
        self._lock = asyncio.Lock()

    async def append(self, blob: Blob) -> PayloadRef:
        """Write a blob to the current segment, or to a new one if that is full."""
        return await self._append(partial(seal, blob), blob.length)

    async def append_frame(self, frame: memoryview) -> PayloadRef:
        """Write a blob that another process sealed, if its checksum is right."""
        return await self._append(partial(_check_and_relabel, frame), len(frame))

    def new_spool(self) -> Spool:
        self._num_spools += 1
        path = self._folder / f"{self._next.owner}-{self._num_spools}"
        return Spool(path, self._spool_bytes, self._spooler)

    async def store(
        self, columns: Mapping[str, Column], spool: Spool | None = None
    ) -> Stored:
        """Write columns. A spool becomes their segment if its routes are in the order of the rows, as
        they are unless conversations took turns."""
        if spool is not None:
            await spool.end()
        if spool is None or not spool.num_bytes:
            return Stored(await self.append(build(columns)))
        blob = build_behind(columns, HEAD_BYTES, spool.num_bytes, spool.checksum)
        if blob is not None:
            ref = await self._adopt(spool, blob)
            spool.become_segment()
            return Stored(ref)
        with spool.read() as spooled:
            return Stored(await self.append(build(_read_spooled(columns, spooled))))

    def taken(self, num_bytes: int) -> None:
        """Do nothing: no append waits for the receiver, because the bytes are in a file."""

    async def _append(self, parts: Parts, length: int) -> PayloadRef:
        return await self._write(length, partial(self._commit, parts, length))

    async def _adopt(self, spool: Spool, blob: Blob) -> PayloadRef:
        return await self._write(blob.length, partial(self._finish, spool, blob))

    async def _write(self, length: int, write: Callable[[], PayloadRef]) -> PayloadRef:
        async with self._lock:
            try:
                return await thread_to_the_end(write)
            except OSError as error:
                raise PayloadError(self._explain(error, length)) from None

    def _finish(self, spool: Spool, blob: Blob) -> PayloadRef:
        """Turn a spool into a segment with one blob."""
        spool.close()
        while (path := self._folder / str(self._next_whole)).exists():
            self._next_whole = self._next_whole.following()
        head, *data = seal(blob, path.name)
        parts = {0: [head], len(head) + blob.num_behind: data}
        become_segment(spool.path, path, parts, durable=self._durable)
        self._next_whole = self._next_whole.following()
        return PayloadRef(path.name, 0, blob.length)

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


def _read_spooled(columns: Mapping[str, Column], spooled: memoryview) -> dict[str, Column]:
    """Return the same columns with views of what is spooled."""

    def view(chunk: SpooledRoutes) -> Routes:
        end = chunk.start + chunk.nbytes
        return np.frombuffer(spooled[chunk.start : end], chunk.dtype).reshape(chunk.shape)

    return {
        name: [view(chunk) if isinstance(chunk, SpooledRoutes) else chunk for chunk in chunks]
        for name, chunks in columns.items()
    }


def _check_and_relabel(frame: memoryview, segment: str) -> Sequence[Buffer]:
    check_data(frame)
    return relabel(frame, segment)
