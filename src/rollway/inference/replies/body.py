"""Cuts the bulk out of a reply's body while it arrives, before anything is parsed.

A reply is a few kilobytes of JSON around strings of many megabytes: routes in base64. The JSON parser
never sees those strings. They lie in reused memory, and what nobody needs is dropped as it comes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from ..http.client import HttpReply
from .npy import NpyHeader, read_header

KEY_ENDING = b'routed_experts"'
"""How the keys of bulks end, in every dialect."""
HEAD_CHARS = 1024
"""How much of a bulk is looked at to decide which part of it is needed."""
REST_BYTES = 8192
"""How much is searched for a bulk at a time: what lies behind its opening quote is copied in vain."""
MAX_KEPT_BYTES = 64 << 20
"""Memory a spool keeps for the next body."""

Skip = Callable[[bytes, "BulkString"], int]
"""From a bulk's key and its first characters, how many of all nobody needs: a multiple of 4."""


def keep_all(key: bytes, bulk: "BulkString") -> int:
    return 0


class BodyBuffer:
    """Memory that bodies are written to one after the other, so that its pages stay warm."""

    def __init__(self, size: int = 4096) -> None:
        self._memory = _memory(size)
        self.length = 0

    def reserve(self, size: int) -> None:
        """Make room at once for a body of this size, at most what is kept for the next."""
        if len(self._memory) < min(size, MAX_KEPT_BYTES):
            self._memory = _memory(min(size, MAX_KEPT_BYTES))

    def add(self, buffer: bytes | bytearray, start: int, end: int) -> None:
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
    """Bytes that are not written to before they are used: a zero for each would hold the loop."""
    return np.empty(size, np.uint8).data


class BulkString:
    """A long string of a body: its first characters, and those from `kept_from` on."""

    def __init__(self, spool: BodyBuffer) -> None:
        self._spool = spool
        self._start = spool.length
        self._end = self._start
        self._lead = 0
        self._header: NpyHeader | None = None
        self.num_chars = 0
        self.kept_from = 0

    @property
    def head(self) -> bytes:
        end = min(self._start + HEAD_CHARS, self._end)
        return bytes(self._spool.view(self._start, end))

    @property
    def header(self) -> NpyHeader:
        """What it says of itself as a .npy file; read once, when its first characters are there."""
        if self._header is None:
            self._header = read_header(self.head)
        return self._header

    def from_char(self, char: int) -> memoryview:
        """The characters from `char` on, which must not have been dropped."""
        assert char >= self.kept_from
        return self._spool.view(self._start + self._lead + char - self.kept_from, self._end)

    def add(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        """Take characters in, but for those that were found not to be needed."""
        dropped = min(max(0, self.kept_from - self.num_chars), end - start)
        self.num_chars += end - start
        if start + dropped < end:
            self._spool.add(buffer, start + dropped, end)
            self._end = self._spool.length

    def drop(self, num_chars: int) -> None:
        """Keep the head, and what comes after the first `num_chars`."""
        self._lead = HEAD_CHARS
        self.kept_from = num_chars
        self._end = self._spool.length = self._start + HEAD_CHARS


class BodyCutter:
    """A sink for JSON: `rest` becomes the JSON with an empty string where each of `bulks` was.

    Bulks are found by their keys, in quotes. One is missing where its field is, or is null.
    """

    def __init__(self, spool: BodyBuffer, skip: Skip = keep_all) -> None:
        self._spool = spool
        self._skip = skip
        self._key = b""
        self._current: BulkString | None = None
        self._looked = False
        self._searched = 0
        self.rest = bytearray()
        self.bulks: dict[bytes, BulkString] = {}

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        while start < end:
            if self._current is not None:
                start = self._take_bulk(self._current, buffer, start, end)
            else:
                start = self._take_rest(buffer, start, end)

    @property
    def num_unneeded(self) -> int:
        """How many of the bytes that come next it need not see."""
        bulk = self._current
        return max(0, bulk.kept_from - bulk.num_chars) if bulk is not None else 0

    def skip(self, num_bytes: int) -> None:
        assert self._current is not None
        self._current.num_chars += num_bytes

    def _take_bulk(self, bulk: BulkString, buffer: bytes | bytearray, start: int, end: int) -> int:
        """Move the piece up to the closing quote; returns where the rest begins."""
        if bulk.num_chars + end - start <= bulk.kept_from:
            bulk.num_chars += end - start  # all of it is dropped, unlooked at
            return end
        quote = buffer.find(b'"', start, end)
        stop = end if quote < 0 else quote
        bulk.add(buffer, start, stop)
        if quote >= 0:
            self._current = None
        elif not self._looked and bulk.num_chars >= HEAD_CHARS:
            self._looked = True
            unneeded = self._skip(self._key, bulk)
            if unneeded > bulk.num_chars:
                bulk.drop(unneeded)
        return stop

    def _take_rest(self, buffer: bytes | bytearray, start: int, end: int) -> int:
        """Add to the rest up to a bulk's opening quote, if the piece has one."""
        before, stop = len(self.rest), min(start + REST_BYTES, end)
        self.rest += memoryview(buffer)[start:stop]
        found = self._find_bulk()
        if found is None:
            return stop
        self._key, opening = found
        del self.rest[opening + 1 :]
        self._current = self.bulks[self._key] = BulkString(self._spool)
        self._searched, self._looked = opening, False
        return start + opening + 1 - before

    def _find_bulk(self) -> tuple[bytes, int] | None:
        """The next key of a bulk whose value is a string, and where that string's opening quote is."""
        rest = self.rest
        at = rest.find(KEY_ENDING, self._searched)
        while at >= 0:
            key_end = value = at + len(KEY_ENDING)
            while value < len(rest) and rest[value] in b": \t\r\n":
                value += 1
            if value == len(rest):
                self._searched = at  # its value has not come yet
                return None
            key = bytes(rest[rest.rfind(b'"', 0, at) : key_end])
            if rest[value] == ord('"') and key not in self.bulks:
                return key, value
            at = rest.find(KEY_ENDING, value)  # null, or something the parser will refuse
        self._searched = max(self._searched, len(rest) - len(KEY_ENDING))
        return None


INLINE_BODY_BYTES = 64 << 10
"""Bodies up to this size are read as they come."""
MAX_LARGE_BODIES = 2
"""Large bodies read at a time; the others wait in the kernel. Bursts, not sums, make a loop late."""


class BodyBuffers:
    """What all engines of a process share."""

    def __init__(self) -> None:
        self._free: asyncio.LifoQueue[BodyBuffer] = asyncio.LifoQueue()
        for _ in range(MAX_LARGE_BODIES):
            self._free.put_nowait(BodyBuffer())

    @asynccontextmanager
    async def taken_for(self, reply: HttpReply) -> AsyncIterator[BodyBuffer]:
        """Memory of its own for a small body; a large one waits for a place."""
        length = reply.head.length
        if length is not None and length <= INLINE_BODY_BYTES:
            yield BodyBuffer(length)
            return
        spool = await self._free.get()
        try:
            spool.reserve(length or 0)
            yield spool
        finally:
            spool.clear()
            self._free.put_nowait(spool)
