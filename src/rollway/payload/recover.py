"""A segment after its writer died: its torn tail is cut off. Blocks; not for a loop."""

import mmap
import os
from pathlib import Path

from msgspec import Struct

from ..errors import PayloadError
from .lock import alone, share
from .scan import Broken, scan, torn_from


class Recovered(Struct, frozen=True):
    """What was found: blobs kept, broken pieces left between them, bytes cut off the end."""

    num_kept: int
    num_broken: int
    num_cut_bytes: int


def recover(path: Path) -> Recovered:
    """Cut the torn tail off a segment that nobody uses any more. What is whole stays untouched."""
    with alone(path, os.O_RDWR) as file:
        data = _map(file)
        size = len(data)
        pieces = list(scan(data, path.name, verify=True))
        end = torn_from(pieces)
        if size and not end:
            raise PayloadError(f"segment {path} has no whole blob of its own to keep; was it renamed?")
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
            share(file.fileno(), path)
            return _map(file.fileno())
    except OSError as error:
        raise PayloadError(f"cannot read segment {path}: {error.strerror or error}") from None


def _map(file: int) -> memoryview:
    if not os.fstat(file).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
