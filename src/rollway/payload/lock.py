"""Who uses a segment's file: all its users share a lock on it, and whoever would change it under them
asks for it alone. A lock ends with the last descriptor of its file, of which a map keeps one of its own.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PayloadError


def share(file: int, path: Path) -> None:
    """Use a segment that was just opened: as long as `file` or a map of it is open, its bytes stay.
    FileNotFoundError if the name went to nobody or somebody else in between."""
    with suppress(OSError):  # not every network file system has locks
        fcntl.flock(file, fcntl.LOCK_SH)
    if not os.path.samestat(os.fstat(file), path.stat()):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@contextmanager
def alone(path: Path, mode: int) -> Iterator[int]:
    """The segment's file, unless somebody writes or reads it."""
    try:
        file = os.open(path, mode)
    except OSError as error:
        raise PayloadError(f"cannot open segment {path}: {error.strerror or error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    except BlockingIOError:
        raise PayloadError(f"segment {path} is in use; try again when its run has ended") from None
    except OSError as error:
        raise PayloadError(f"cannot have segment {path} alone: {error.strerror or error}") from None
    finally:
        os.close(file)


def is_in_use(path: Path) -> bool:
    """Whether a process writes or reads this segment now: its last blob may be unfinished, not torn."""
    try:
        with alone(path, os.O_RDONLY):
            return False
    except PayloadError:
        return True
