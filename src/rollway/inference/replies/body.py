"""Cuts the long strings out of a reply's body while it arrives, before anything is parsed.

A reply is a few kilobytes of JSON around strings of many megabytes: routes in base64. This module calls
each of these strings a bulk. The JSON parser never sees a bulk. Bulks are kept in reused memory, and
their unneeded parts are dropped as they arrive.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pybase64
from msgspec import Struct

from ...errors import EngineError
from ...loop.lanes.lanes import FairQueue
from ..http.connection import IDLE_S
from ..http.framing import BodySink, Bytes, HttpAway

KEY_ENDING = b'routed_experts"'
"""The end of every key whose value is a bulk, in all dialects."""
HEAD_CHARS = 1024
"""How much of a bulk must have arrived before it is decided which part of it is needed."""
REST_BYTES = 8192
"""How much of the body is searched for a bulk at a time. Bytes after the bulk's opening quote are
copied and then deleted again, so this is small."""
MAX_KEPT_BYTES = 64 << 20
"""How much memory a BodyBuffer keeps for the next body."""

Bulks = Mapping[bytes, "BulkString"]
UnneededChars = Callable[[bytes, "BulkString"], int]
"""Returns how many characters at the start of a bulk are not needed, a multiple of 4. The arguments are
the bulk's key and the bulk, of which the first characters have arrived."""


def keep_all(key: bytes, bulk: "BulkString") -> int:
    return 0


class BodyBuffer:
    """Memory that one body after the other is written to, so that its pages stay warm."""

    def __init__(self, size: int = 4096) -> None:
        self._memory = _memory(size)
        self.length = 0

    def reserve(self, size: int) -> None:
        """Make room at once for a body of this size, up to MAX_KEPT_BYTES."""
        size = min(size, MAX_KEPT_BYTES)
        if len(self._memory) < size:
            self._memory = _memory(size)

    def add(self, buffer: Bytes, start: int, end: int) -> None:
        length = self.length + end - start
        if length > len(self._memory):
            larger = _memory(max(2 * len(self._memory), length))
            larger[: self.length] = self._memory[: self.length]
            self._memory = larger
        self._memory[self.length : length] = memoryview(buffer)[start:end]
        self.length = length

    def view(self, start: int, end: int) -> memoryview:
        return self._memory[start:end]

    def clear(self) -> None:
        self.length = 0
        if len(self._memory) > MAX_KEPT_BYTES:
            self._memory = _memory(4096)


def _memory(size: int) -> memoryview:
    """Return bytes that are not set to zero: setting many megabytes would hold up the loop."""
    return np.empty(size, np.uint8).data


_NPY_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|\x02\x00....)"
    rb"\{'descr': '([<|=][a-z][0-9]+)', 'fortran_order': (True|False), 'shape': \(([0-9, ]*)\), \} *\n",
    re.DOTALL,
)
_AXIS = re.compile(rb"[0-9]+")


MAX_HEADERS = 1_024
"""Headers that are remembered: most replies of a run have routes of some other reply's shape."""
HEADER_CHARS = 172
"""The base64 of the 128 bytes that numpy writes before any array of three axes."""


class NpyHeader(Struct, frozen=True):
    """The shape of routes in a .npy file, and the byte `offset` at which they start."""

    offset: int
    num_positions: int
    layers: int
    topk: int
    dtype: np.dtype[Any]

    @property
    def position_bytes(self) -> int:
        return self.layers * self.topk * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.offset + self.num_positions * self.position_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{self.num_positions}, {self.layers}, {self.topk}]"


@lru_cache(MAX_HEADERS)
def read_header(text: bytes) -> NpyHeader:
    """Read the header of a .npy file from the first characters of its base64. Raises EngineError unless
    the file holds integers of shape `[tokens, layers, topk]`."""
    try:
        raw = pybase64.b64decode(text[: len(text) // 4 * 4], validate=True)
        match = _NPY_HEADER.match(raw)
        if match is None:
            raise bad_routes("they are not a .npy file")
        descr, fortran, shape = match.groups()
        dtype = np.dtype(descr.decode())
    except (TypeError, ValueError) as error:
        raise bad_routes(str(error)) from None
    if dtype.kind not in "ui":
        raise bad_routes(f"{dtype} is not a type of integers")
    axes = [int(axis) for axis in _AXIS.findall(shape)]
    if len(axes) != 3 or fortran == b"True":
        raise bad_routes(f"{dtype}{axes} is not [tokens, layers, topk]")
    num_positions, layers, topk = axes
    return NpyHeader(match.end(), num_positions, layers, topk, dtype)


def bad_routes(reason: str) -> EngineError:
    return EngineError(f"the engine's routes cannot be read: {reason}")


class BulkString:
    """A long string of a body: its first characters, and those from `kept_from` on."""

    def __init__(self, body_buffer: BodyBuffer) -> None:
        self._store = body_buffer
        self._start = self._end = body_buffer.length
        self._head_chars = 0
        """How many characters are kept before `kept_from`."""
        self._header: NpyHeader | None = None
        self.num_chars = 0
        self.kept_from = 0

    @property
    def head(self) -> bytes:
        end = min(self._start + HEAD_CHARS, self._end)
        return bytes(self._store.view(self._start, end))

    @property
    def header(self) -> NpyHeader:
        """The header of this bulk as a .npy file, read once, when the first characters are there."""
        if self._header is None:
            head = self.head
            try:
                self._header = read_header(head[:HEADER_CHARS])
            except EngineError:  # its header may be longer
                self._header = read_header(head)
        return self._header

    def from_char(self, char: int) -> memoryview:
        """Return the characters from `char` on, which must not have been dropped."""
        assert char >= self.kept_from
        start = self._start + self._head_chars + char - self.kept_from
        return self._store.view(start, self._end)

    def add(self, buffer: Bytes, start: int, end: int) -> None:
        """Add the characters that arrived, without those before `kept_from`."""
        dropped = min(max(0, self.kept_from - self.num_chars), end - start)
        self.num_chars += end - start
        if start + dropped < end:
            self._store.add(buffer, start + dropped, end)
            self._end = self._store.length

    def drop(self, num_chars: int) -> None:
        """Drop all of the first `num_chars` except for the head, which has arrived already."""
        self._head_chars = HEAD_CHARS
        self.kept_from = num_chars
        self._end = self._store.length = self._start + HEAD_CHARS


class BodyCutter:
    """A sink for JSON. `rest` becomes the JSON with an empty string in place of each of the `bulks`.
    These are keyed by field name, in quotes. A field that is missing or null has no entry."""

    def __init__(
        self, body_buffer: BodyBuffer, unneeded_chars: UnneededChars = keep_all
    ) -> None:
        self._store = body_buffer
        self._unneeded_chars = unneeded_chars
        self._key = b""
        self._current: BulkString | None = None
        self._is_decided = False
        """True once it is known how much of the current bulk is needed."""
        self._searched = 0
        self.rest = bytearray()
        self.bulks: dict[bytes, BulkString] = {}

    def feed(self, buffer: Bytes, start: int, end: int) -> None:
        while start < end:
            if self._current is not None:
                start = self._take_bulk(self._current, buffer, start, end)
            else:
                start = self._take_rest(buffer, start, end)

    @property
    def num_unneeded(self) -> int:
        bulk = self._current
        return max(0, bulk.kept_from - bulk.num_chars) if bulk is not None else 0

    def skip(self, num_bytes: int) -> None:
        assert self._current is not None
        self._current.num_chars += num_bytes

    def _take_bulk(self, bulk: BulkString, buffer: Bytes, start: int, end: int) -> int:
        """Add the piece to the bulk, up to the closing quote. Return where the rest of it begins."""
        if bulk.num_chars + end - start <= bulk.kept_from:
            # the whole piece is unneeded, so it is not searched
            bulk.num_chars += end - start
            return end
        quote = buffer.find(b'"', start, end)
        stop = end if quote < 0 else quote
        bulk.add(buffer, start, stop)
        if quote >= 0:
            self._current = None
        elif not self._is_decided and bulk.num_chars >= HEAD_CHARS:
            self._is_decided = True
            num_unneeded = self._unneeded_chars(self._key, bulk)
            if num_unneeded > bulk.num_chars:
                bulk.drop(num_unneeded)
        return stop

    def _take_rest(self, buffer: Bytes, start: int, end: int) -> int:
        """Add the piece to the rest, up to the opening quote of a bulk. Return where the bulk begins."""
        before, stop = len(self.rest), min(start + REST_BYTES, end)
        self.rest += memoryview(buffer)[start:stop]
        found = self._find_bulk()
        if found is None:
            return stop
        self._key, opening = found
        del self.rest[opening + 1 :]
        self._current = self.bulks[self._key] = BulkString(self._store)
        self._searched, self._is_decided = opening, False
        return start + opening + 1 - before

    def _find_bulk(self) -> tuple[bytes, int] | None:
        """Return the key of the next bulk and the position of its opening quote, or None."""
        rest = self.rest
        at = rest.find(KEY_ENDING, self._searched)
        while at >= 0:
            key_end = value = at + len(KEY_ENDING)
            while value < len(rest) and rest[value] in b": \t\r\n":
                value += 1
            if value == len(rest):
                self._searched = at  # the value has not arrived yet
                return None
            key = bytes(rest[rest.rfind(b'"', 0, at) : key_end])
            if rest[value] == ord('"') and key not in self.bulks:
                return key, value
            # the value is null, or something the parser will refuse
            at = rest.find(KEY_ENDING, value)
        self._searched = max(self._searched, len(rest) - len(KEY_ENDING))
        return None


INLINE_BODY_BYTES = 64 << 10
"""Bodies up to this size are read as soon as they arrive."""
MAX_LARGE_BODIES = 2
"""How many large bodies of one engine are read at a time. The others wait in the kernel: reading many
of them at once would hold the loop in one long burst. Of several engines each has one place."""


def bounded(sink: BodySink, limit: int) -> BodySink:
    """Return a sink that raises EngineError for a body of more bytes than any right reply has."""
    num_bytes = 0

    def take(buffer: Bytes, start: int, end: int) -> None:
        nonlocal num_bytes
        num_bytes += end - start
        if num_bytes > limit:
            raise EngineError(
                f"its reply has more than {limit} bytes, which no right one has"
            )
        sink(buffer, start, end)

    return take


MAX_WAITING = 100_000
"""Replies of one engine that may wait to be read: more than a worker has rollouts."""


class BodyBuffers:
    """The places for large bodies of one engine: an engine that stalls holds up no other."""

    def __init__(self, num_places: int = MAX_LARGE_BODIES, idle_s: float = IDLE_S) -> None:
        self._free: FairQueue[BodyBuffer] = FairQueue("large bodies", MAX_WAITING)
        for _ in range(num_places):
            self._free.free(BodyBuffer())
        self._idle_s = idle_s
        self._ended_s = 0.0
        """When the last large body was read to its end."""

    @asynccontextmanager
    async def borrow(self, length: int) -> AsyncIterator[BodyBuffer]:
        """Lend a buffer to a large body. It waits until one is free. If no large body is read to its end
        for `idle_s`, those that wait are given up with HttpAway."""
        buffer = await self._take()
        try:
            buffer.reserve(length)
            yield buffer
            self._ended_s = time.monotonic()
        finally:
            buffer.clear()
            self._free.free(buffer)

    async def _take(self) -> BodyBuffer:
        patient_until_s = time.monotonic() + self._idle_s
        while True:
            try:
                async with asyncio.timeout(patient_until_s - time.monotonic()):
                    return await self._free.take()
            except TimeoutError:
                patient_until_s = self._ended_s + self._idle_s
                if patient_until_s <= time.monotonic():
                    raise HttpAway(
                        f"its reply waited {self._idle_s:g} s to be read, because other replies of this "
                        "engine have stopped in the middle",
                        request_was_sent=True,
                    ) from None
