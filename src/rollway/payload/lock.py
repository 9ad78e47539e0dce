"""Locks on segment files. Every user of a segment shares a lock on its file. Code that would change the
file under its users asks for the lock exclusively.

A lock ends when the last descriptor of its file is closed. A memory map keeps a descriptor open.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PayloadError


def lock_shared(file: int, path: Path) -> None:
    """Lock a segment that was just opened: as long as `file` or a map of it is open, its bytes stay.
    Raise FileNotFoundError if the file was removed or renamed in between."""
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(file, fcntl.LOCK_SH)
    if not os.path.samestat(os.fstat(file), path.stat()):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def map_shared(path: Path) -> memoryview:
    """Return the bytes of a segment, which stay as long as the view is referenced."""
    with path.open("rb") as file:
        lock_shared(file.fileno(), path)
        return map_file(file.fileno())


def map_file(file: int) -> memoryview:
    if not os.fstat(file).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))


@contextmanager
def open_exclusively(path: Path, mode: int) -> Iterator[int]:
    """Open a segment's file. Raise PayloadError if another process writes or reads it."""
    try:
        file = os.open(path, mode)
    except OSError as error:
        raise PayloadError(f"cannot open segment {path}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"segment {path} is in use; try again when its run has ended"
            raise PayloadError(text) from None
        except OSError as error:
            text = f"cannot lock segment {path}: {error.strerror or error}"
            raise PayloadError(text) from None
        yield file
    finally:
        os.close(file)


def is_in_use(path: Path) -> bool:
    """Return whether a process uses this segment. Its last blob may then be unfinished, not torn."""
    try:
        with open_exclusively(path, os.O_RDONLY):
            return False
    except PayloadError:
        return True
