"""Walks a segment blob by blob, without refs, and finds out which blobs are whole and what is broken.

A writer that was killed leaves whole blobs and behind them a torn tail: an unfinished write, and bytes
of the segment that used the file before.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from ..errors import PayloadError
from .blob import ALIGN, OPENING, ColumnEntry, check_data, check_mark, pad, parse, read_header
from .lock import map_file, map_shared, open_exclusively

_opening = re.compile(re.escape(OPENING))


class WholeBlob(Struct, frozen=True):
    """A blob with a readable header and complete data. With `verify` its checksum is right too."""

    offset: int
    length: int
    entries: dict[str, ColumnEntry]

    @property
    def end(self) -> int:
        return self.offset + self.length


class BrokenPiece(Struct, frozen=True):
    """Bytes that are not a whole blob. At the end of a segment they are its torn tail."""

    offset: int
    length: int
    why: str


Piece = WholeBlob | BrokenPiece


def scan(data: memoryview, segment: str, *, verify: bool = False) -> Iterator[Piece]:
    """Yield the pieces of the segment of this name, in order. With `verify` every byte is read."""
    offset = 0
    while offset < len(data):
        piece = _piece_at(data, offset, segment, verify=verify)
        yield piece
        end = offset + piece.length
        offset = end + pad(end)


def tail_offset(pieces: Iterable[Piece]) -> int:
    """Return where the torn tail begins: behind the last whole blob."""
    return max((piece.end for piece in pieces if isinstance(piece, WholeBlob)), default=0)


def _piece_at(data: memoryview, offset: int, segment: str, *, verify: bool) -> Piece:
    try:
        header = read_header(data[offset:])
        blob = data[offset : offset + header.end]
        parse(blob)
        check_mark(blob, segment)
        if verify:
            check_data(blob)
        return WholeBlob(offset, header.end, header.entries)
    except PayloadError as error:
        return BrokenPiece(offset, _next_opening(data, offset) - offset, str(error))


def _next_opening(data: memoryview, offset: int) -> int:
    """Return where the next blob after a broken piece seems to begin, or the end of the data."""
    for found in _opening.finditer(data, offset + ALIGN):
        start = found.start() - 8
        if start % ALIGN == 0:
            return start
    return len(data)


class RecoveryReport(Struct, frozen=True):
    """The blobs that were kept, the broken pieces left between them, and the bytes cut off the end."""

    num_kept: int
    num_broken: int
    num_cut_bytes: int


def recover(path: Path) -> RecoveryReport:
    """Cut the torn tail off a segment that is no longer in use. Whole blobs stay untouched."""
    with open_exclusively(path, os.O_RDWR) as file:
        data = map_file(file)
        size = len(data)
        pieces = list(scan(data, path.name, verify=True))
        end = tail_offset(pieces)
        if size and not end:
            raise PayloadError(
                f"no whole blob in {path} belongs to that segment; was the file renamed?"
            )
        if end < size:
            del data
            try:
                os.ftruncate(file, end)
                os.fsync(file)
            except OSError as error:
                raise PayloadError(f"cannot cut segment {path}: {error.strerror}") from None
    before = [piece for piece in pieces if piece.offset < end]
    num_broken = sum(isinstance(piece, BrokenPiece) for piece in before)
    return RecoveryReport(len(before) - num_broken, num_broken, size - end)


def map_segment(path: Path) -> memoryview:
    try:
        return map_shared(path)
    except OSError as error:
        raise PayloadError(f"cannot read segment {path}: {error.strerror or error}") from None
