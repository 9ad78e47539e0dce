"""One segment file while it is written. Everything here blocks: it runs in the thread lane."""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .blob import Buffer, pad

MAX_VECTORS = 1024
"""IOV_MAX of Linux."""


class OpenSegment:
    """A new file that grows by whole blobs: `end` is where the last one ends, and a write that fails
    leaves nothing behind it.

    The file is locked as long as somebody writes to it, so that nobody takes an unfinished write for
    a torn one.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self.end = 0
        self.is_sound = True
        self._durable = durable
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with suppress(OSError):  # not every network file system has locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if durable:
            try:
                _sync_folder(path.parent)
            except OSError:
                self.close()
                path.unlink()
                raise

    def append(self, parts: Sequence[Buffer]) -> int:
        """Write a blob at the next multiple of 64, and through to the disk if asked for; its offset."""
        offset = self.end + pad(self.end)
        try:
            end = _write_all(self._file, parts, offset)
        except OSError:
            self._cut()
            raise
        if self._durable:
            self._sync()
        self.end = end
        return offset

    def close(self) -> None:
        os.close(self._file)

    def _sync(self) -> None:
        try:
            os.fdatasync(self._file) if hasattr(os, "fdatasync") else os.fsync(self._file)
        except OSError:
            self.is_sound = False  # the kernel may have dropped the pages and will not say so again
            self._cut()
            raise

    def _cut(self) -> None:
        """Give the space of a failed write back; the next one begins where it did."""
        with suppress(OSError):
            os.ftruncate(self._file, self.end)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name as durable as its bytes."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_all(file: int, parts: Sequence[Buffer], offset: int) -> int:
    """`pwritev` until everything is written; a short write goes on where it stopped. The end."""
    waiting, at = list(parts), 0
    while at < len(waiting):
        written = os.pwritev(file, waiting[at : at + MAX_VECTORS], offset)
        offset += written
        while at < len(waiting) and written >= (size := memoryview(waiting[at]).nbytes):
            written -= size
            at += 1
        if written:
            waiting[at] = memoryview(waiting[at]).cast("B")[written:]
    return offset
