"""One segment file while it is written. Everything here blocks: it runs in the thread lane."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .blob import Buffer, pad
from .lock import share
from .reuse import take

MAX_VECTORS = 1024
"""IOV_MAX of Linux."""


class OpenSegment:
    """A file that is filled by whole blobs: `end` is where the last one ends, and a write that fails
    leaves nothing of itself.

    Until it is closed, bytes of a former segment may lie behind the end. The file is in use as long as
    somebody writes to it, so that nobody takes an unfinished write for a torn one.
    """

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self.end = 0
        self.is_sound = True
        self._durable = durable
        self._file = _new_file(path)
        try:
            share(self._file, path)
            if durable:
                _sync_folder(path.parent)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
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
        self._cut()
        os.close(self._file)

    def _sync(self) -> None:
        try:
            os.fdatasync(self._file) if hasattr(os, "fdatasync") else os.fsync(self._file)
        except OSError:
            self.is_sound = False  # the kernel may have dropped the pages and will not say so again
            self._cut()
            raise

    def _cut(self) -> None:
        """Give the space behind the last whole blob back."""
        with suppress(OSError):
            os.ftruncate(self._file, self.end)


def _new_file(path: Path) -> int:
    """A file whose name was nobody's, in the place of a released one if there is any."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    if not take(path):
        return file
    os.close(file)
    return os.open(path, os.O_RDWR)


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
