"""Walks a segment blob by blob, without refs: what is whole, what is broken. Pure.

A writer that was killed leaves whole blobs and behind them a torn tail: an unfinished write, and what
the file held before it was this segment's.
"""

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from ..errors import PayloadError
from .blob import ALIGN, OPENING, Entry, check, check_mark, pad, parse, read_header

_opening = re.compile(re.escape(OPENING))


class Whole(Struct, frozen=True):
    """A blob whose header parses, whose data is all there and, if asked for, has its checksum."""

    offset: int
    length: int
    entries: dict[str, Entry]

    @property
    def end(self) -> int:
        return self.offset + self.length


class Broken(Struct, frozen=True):
    """Bytes that are no whole blob; at the end of a segment they are its torn tail."""

    offset: int
    length: int
    why: str


Piece = Whole | Broken


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
    return max((piece.end for piece in pieces if isinstance(piece, Whole)), default=0)


def _piece_at(data: memoryview, offset: int, segment: str, *, verify: bool) -> Piece:
    try:
        header = read_header(data[offset:])
        blob = data[offset : offset + header.end]
        parse(blob)
        check_mark(blob, segment)
        if verify:
            check(blob)
        return Whole(offset, header.end, header.entries)
    except PayloadError as error:
        return Broken(offset, _next_opening(data, offset) - offset, str(error))


def _next_opening(data: memoryview, offset: int) -> int:
    """Where, behind something broken, the next blob seems to begin; the end if none does."""
    for found in _opening.finditer(data, offset + ALIGN):
        start = found.start() - 8
        if start % ALIGN == 0:
            return start
    return len(data)
