"""Appends blobs to segment files, in the thread lane, with vectored writes and no join in memory."""

import asyncio
import errno
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from ..errors import PayloadError
from ..loop.lanes.lanes import thread_to_the_end
from ..records.payload import PayloadRef
from .blob import Blob, Buffer, check, moved, seal
from .segment import OpenSegment
from .store import Stored

Durability = Literal["process", "host"]
Parts = Callable[[str], Sequence[Buffer]]
"""The bytes of a blob for the segment of this name."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SegmentWriter:
    """One process's segments, one after the other: `<name>-0000.seg`, `<name>-0001.seg`, …

    A ref is returned only after its bytes are written: in the kernel's hands, so that they outlive
    this process, or with durability `host` on the disk, so that they outlive the machine's power. A
    segment is closed for writing once it holds `segment_bytes`; it is then the reader's to remove, and
    its file a next segment's.
    An append that fails leaves everything before it as it was, and the next one may succeed.
    """

    def __init__(
        self, folder: Path, name: str, segment_bytes: int, durability: Durability = "process"
    ) -> None:
        self._folder = folder
        self._name = name
        self._segment_bytes = segment_bytes
        self._durable = durability == "host"
        self._next_number = 0
        self._segment: OpenSegment | None = None
        self._lock = asyncio.Lock()

    async def append(self, blob: Blob) -> PayloadRef:
        """Write a blob to the current segment, or a new one if that is full."""
        return await self._append(partial(seal, blob), blob.length)

    async def append_whole(self, frame: memoryview) -> PayloadRef:
        """Write a blob that comes in one piece from elsewhere, if its checksum is right."""
        return await self._append(partial(_checked, frame), len(frame))

    async def store(self, blob: Blob) -> Stored:
        """Append a blob. Its ref is enough to find the bytes in the file, so no frame travels."""
        return Stored(await self.append(blob))

    def taken(self, num_bytes: int) -> None:
        """Nothing waits for the receiver: the bytes are on the file system."""

    async def _append(self, parts: Parts, length: int) -> PayloadRef:
        async with self._lock:
            try:
                return await thread_to_the_end(self._commit, parts, length)
            except OSError as error:
                raise PayloadError(self._explain(error, length)) from None

    def _commit(self, parts: Parts, length: int) -> PayloadRef:
        """The whole append, in one call of the thread lane. The lock makes it the only one."""
        segment = self._segment
        if segment is None or not segment.is_sound or segment.end >= self._segment_bytes:
            segment = self._rotate()
        offset = segment.append(parts(segment.path.name))
        return PayloadRef(segment.path.name, offset, length)

    def _rotate(self) -> OpenSegment:
        """A new file; names that a writer of the same name used before are left alone."""
        self.close()
        while (path := self._path(self._next_number)).exists():
            self._next_number += 1
        self._segment = OpenSegment(path, durable=self._durable)
        self._next_number += 1
        return self._segment

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:04d}.seg"

    def close(self) -> None:
        """End the current segment; a further append begins a new one."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _explain(self, error: OSError, length: int) -> str:
        where = error.filename or (self._segment.path if self._segment else self._folder)
        said = f"cannot write {length} bytes to {where}: {error.strerror or error}"
        if error.errno in _FULL:
            return f"{said}; make room there, and rollouts go on (what was written before is intact)"
        return f"{said}; check that the folder exists, is writable and on a healthy disk"

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(frame: memoryview, segment: str) -> Sequence[Buffer]:
    check(frame)
    return moved(frame, segment)
