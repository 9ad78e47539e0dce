"""One segment file while it is written. Everything here blocks, so it runs in the thread lane."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .blob import Buffer, pad
from .lock import lock_shared
from .reuse import take_spare

MAX_VECTORS = 1024
"""IOV_MAX of Linux."""


class OpenSegment:
    """A file that is filled with whole blobs. `end` is where the last one ends; a failed write leaves
    nothing behind. Until the segment is closed, bytes of a former segment may lie behind `end`. The file
    is locked while it is written, so that other processes do not take an unfinished write for torn."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path = path
        self.end = 0
        self.is_sound = True
        self._durable = durable
        self._file = _new_file(path)
        try:
            lock_shared(self._file, path)
            if durable:
                sync_folder(path.parent)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def append(self, parts: Sequence[Buffer]) -> int:
        """Write a blob at the next multiple of 64, if durable through to the disk. Return its offset."""
        offset = self.end + pad(self.end)
        try:
            end = write_all(self._file, parts, offset)
            if self._durable:
                self._sync()
        except OSError:
            self._cut()
            raise
        self.end = end
        return offset

    def close(self) -> None:
        self._cut()
        os.close(self._file)

    def _sync(self) -> None:
        sync = getattr(os, "fdatasync", os.fsync)
        try:
            sync(self._file)
        except OSError:
            # the kernel may have dropped the pages, and will not report that again
            self.is_sound = False
            raise

    def _cut(self) -> None:
        """Give back the space behind the last whole blob."""
        with suppress(OSError):
            os.ftruncate(self._file, self.end)


def become_segment(
    file: Path, path: Path, parts: Mapping[int, Sequence[Buffer]], *, durable: bool
) -> None:
    """Write the last parts of a file, each at its offset, cut it behind them, and give it the name of a
    segment. Its name appears once it is whole."""
    opened = os.open(file, os.O_RDWR)
    try:
        end = max(write_all(opened, buffers, offset) for offset, buffers in parts.items())
        os.ftruncate(opened, end)
        if durable:
            os.fsync(opened)
    finally:
        os.close(opened)
    file.rename(path)
    if durable:
        sync_folder(path.parent)


def _new_file(path: Path) -> int:
    """Create a file with a new name. It takes over a spare file if there is one."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    if not take_spare(path):
        return file
    os.close(file)
    return os.open(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Make a new file's name as durable as its bytes."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_all(file: int, parts: Sequence[Buffer], offset: int) -> int:
    """Call `pwritev` until everything is written; return where the last part ends."""
    views, index = [memoryview(part).cast("B") for part in parts], 0
    while index < len(views):
        written = os.pwritev(file, views[index : index + MAX_VECTORS], offset)
        offset += written
        while index < len(views) and written >= len(views[index]):
            written -= len(views[index])
            index += 1
        if written:
            views[index] = views[index][written:]
    return offset
