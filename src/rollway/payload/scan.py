"""Walks a segment blob by blob, without refs: what is whole, what is broken. Pure.

A writer that was killed leaves whole blobs and behind them a torn tail: an unfinished write, and what
the file held before it was this segment's.
"""

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from ..errors import PayloadError
from .blob import ALIGN, OPENING, ColumnEntry, check, check_mark, pad, parse, read_header
from .lock import alone, share

_opening = re.compile(re.escape(OPENING))


class WholeBlob(Struct, frozen=True):
    """A blob whose header parses, whose data is all there and, if asked for, has its checksum."""

    offset: int
    length: int
    entries: dict[str, ColumnEntry]

    @property
    def end(self) -> int:
        return self.offset + self.length


class BrokenPiece(Struct, frozen=True):
    """Bytes that are no whole blob; at the end of a segment they are its torn tail."""

    offset: int
    length: int
    why: str


Piece = WholeBlob | BrokenPiece


def scan(data: memoryview, segment: str, *, verify: bool = False) -> Iterator[Piece]:
    """The pieces of the segment of this name, in order. With `verify` every byte is read."""
    offset = 0
    while offset < len(data):
        piece = _piece_at(data, offset, segment, verify=verify)
        yield piece
        end = offset + piece.length
        offset = end + pad(end)


def torn_from(pieces: Iterable[Piece]) -> int:
    """Where the torn tail begins: behind the last whole blob."""
    return max((piece.end for piece in pieces if isinstance(piece, WholeBlob)), default=0)


def _piece_at(data: memoryview, offset: int, segment: str, *, verify: bool) -> Piece:
    try:
        header = read_header(data[offset:])
        blob = data[offset : offset + header.end]
        parse(blob)
        check_mark(blob, segment)
        if verify:
            check(blob)
        return WholeBlob(offset, header.end, header.entries)
    except PayloadError as error:
        return BrokenPiece(offset, _next_opening(data, offset) - offset, str(error))


def _next_opening(data: memoryview, offset: int) -> int:
    """Where, behind something broken, the next blob seems to begin; the end if none does."""
    for found in _opening.finditer(data, offset + ALIGN):
        start = found.start() - 8
        if start % ALIGN == 0:
            return start
    return len(data)


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
    num_broken = sum(isinstance(piece, BrokenPiece) for piece in before)
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
