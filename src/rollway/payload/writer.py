"""Appends blobs to segment files, in the thread lane, with vectored writes and no join in memory."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import PayloadError
from ..loop.lanes import thread_to_the_end
from ..records.payload import PayloadRef
from .blob import Blob, pad

MAX_VECTORS = 1024
"""IOV_MAX of Linux."""


class SegmentWriter:
    """One process's segments, one after the other: `<name>-0000.seg`, `<name>-0001.seg`, …

    A ref is returned only after its bytes are written. A segment is closed for writing once it holds
    `segment_bytes`; it is then the reader's to remove.
    """

    def __init__(self, folder: Path, name: str, segment_bytes: int) -> None:
        self._folder = folder
        self._name = name
        self._segment_bytes = segment_bytes
        self._number = 0
        self._file: int | None = None
        self._end = 0
        self._lock = asyncio.Lock()

    async def append(self, blob: Blob) -> PayloadRef:
        """Write a blob to the current segment, or a new one if that is full."""
        async with self._lock:
            if self._file is None or self._end >= self._segment_bytes:
                self._rotate()
            assert self._file is not None
            ref = PayloadRef(self._segment, self._end, blob.length)
            self._end += blob.length + pad(blob.length)
            try:
                await thread_to_the_end(_write_all, self._file, blob.parts, ref.offset)
            except OSError as error:
                where = self._folder / self._segment
                raise PayloadError(f"cannot write {blob.length} bytes to {where}: {error}") from None
            return ref

    @property
    def _segment(self) -> str:
        return f"{self._name}-{self._number:04d}.seg"

    def _rotate(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._number += 1
        self._end = 0
        self._file = os.open(self._folder / self._segment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write_all(file: int, parts: Sequence[memoryview], offset: int) -> None:
    """`pwritev` until everything is written; a short write goes on where it stopped."""
    queue = list(parts)
    while queue:
        written = os.pwritev(file, queue[:MAX_VECTORS], offset)
        offset += written
        while queue and written >= len(queue[0]):
            written -= len(queue.pop(0))
        if written:
            queue[0] = queue[0][written:]
