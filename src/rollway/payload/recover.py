"""A segment after its writer died: its torn tail is cut off. Blocks; not for a loop."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from ..errors import PayloadError
from .scan import Broken, scan, torn_from


class Recovered(Struct, frozen=True):
    """What was found: blobs kept, broken pieces left between them, bytes cut off the end."""

    num_kept: int
    num_broken: int
    num_cut_bytes: int


def recover(path: Path) -> Recovered:
    """Cut the torn tail off a segment that nobody writes any more. What is whole stays untouched."""
    with _locked(path, os.O_RDWR, fcntl.LOCK_EX) as file:
        data = mapped(path)
        size = len(data)
        pieces = list(scan(data, verify=True))
        end = torn_from(pieces)
        if end < size:
            del data
            os.ftruncate(file, end)
            os.fsync(file)
    before = [piece for piece in pieces if piece.offset < end]
    num_broken = sum(isinstance(piece, Broken) for piece in before)
    return Recovered(len(before) - num_broken, num_broken, size - end)


def mapped(path: Path) -> memoryview:
    """A segment's bytes as they are now."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise PayloadError(f"cannot read segment {path}: {error.strerror or error}") from None


def is_written(path: Path) -> bool:
    """Whether a process writes to this segment now: its last blob may be unfinished, not torn."""
    try:
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH):
            return False
    except PayloadError:
        return True


@contextmanager
def _locked(path: Path, mode: int, how: int) -> Iterator[int]:
    """The segment's file, unless its writer lives."""
    try:
        file = os.open(path, mode)
    except OSError as error:
        raise PayloadError(f"cannot open segment {path}: {error.strerror or error}") from None
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        yield file
    except BlockingIOError:
        raise PayloadError(
            f"segment {path} is being written; try again when its run has ended"
        ) from None
    finally:
        os.close(file)
