"""How an HTTP/1.1 reply is framed: its head, and where its body ends. Pure."""

import re
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

MAX_HEAD_BYTES = 64 << 10
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")

BodySink = Callable[[bytes | bytearray, int, int], None]
"""Takes `buffer[start:end]`; the buffer is reused as soon as it returns."""


class Skipper(Protocol):
    """A sink's other side: what it can do without."""

    @property
    def num_unneeded(self) -> int:
        """How many of the bytes that come next it need not see."""

    def skip(self, num_bytes: int) -> None:
        """So many of them went by."""


class HttpError(ConnectionError):
    """The server cannot be reached, hung up, or does not speak HTTP."""


class HttpAway(HttpError):
    """The server cannot be reached, or hung up; `was_asked` if a request was on its way."""

    def __init__(self, message: str, *, was_asked: bool = False) -> None:
        super().__init__(message)
        self.was_asked = was_asked


class ReplyHead(Struct, frozen=True):
    """A reply's status and headers; `length` is None where only its end tells how long a body is."""

    status: int
    headers: dict[str, str]

    @property
    def length(self) -> int | None:
        if self.status in (204, 304):
            return 0
        return None if self.is_chunked else _whole(self.headers.get("content-length"))

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def closes(self) -> bool:
        """Whether the connection ends with this reply."""
        no_end = self.length is None and not self.is_chunked
        return no_end or self.headers.get("connection", "").lower() == "close"


def _whole(text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit()):
        raise HttpError(f"Content-Length is {text!r}")
    return None if text is None else int(text)


def parse_head(text: bytes) -> ReplyHead:
    """The head of a reply, up to the empty line."""
    status_line, *lines = text.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()):
        raise HttpError(f"not an HTTP reply: {status_line[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return ReplyHead(int(code), headers)


class CountedBody:
    """A body of known length."""

    def __init__(self, length: int, sink: BodySink, skipper: Skipper | None) -> None:
        self._left = length
        self._sink = sink
        self._skipper = skipper
        self.done = length == 0
        self.has_surplus = False

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        taken = min(end - start, self._left)
        if taken:
            self._sink(buffer, start, start + taken)
        self._left -= taken
        self.done = self._left == 0
        self.has_surplus |= taken < end - start

    @property
    def num_unneeded(self) -> int:
        """How many of the bytes that come next can be skipped."""
        return min(self._left, self._skipper.num_unneeded) if self._skipper else 0

    def skip(self, num_bytes: int) -> None:
        assert self._skipper is not None
        self._skipper.skip(num_bytes)
        self._left -= num_bytes
        self.done = self._left == 0


class ChunkedBody:
    """A body in chunks, each after a line with its size; one of size 0 is the last."""

    def __init__(self, sink: BodySink) -> None:
        self._sink = sink
        self._left = 0
        self._line = bytearray()
        self._in_trailer = False
        self.done = False
        self.has_surplus = False

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        while start < end and not self.done:
            if self._left:
                taken = min(end - start, self._left)
                self._sink(buffer, start, start + taken)
                self._left -= taken
                start += taken
                continue
            newline = buffer.find(b"\n", start, end)
            self._line += buffer[start : end if newline < 0 else newline + 1]
            start = end if newline < 0 else newline + 1
            if newline >= 0:
                self._on_line(bytes(self._line).strip())
                self._line.clear()
            elif len(self._line) > MAX_HEAD_BYTES:
                raise HttpError("a chunk's size has no end")
        self.has_surplus |= start < end

    def _on_line(self, line: bytes) -> None:
        """A size, the end of a chunk's data (empty), or a line of the trailer, whose end is empty."""
        if self._in_trailer:
            self.done = not line
        elif line:
            size = line.partition(b";")[0].strip()
            if not _HEX.fullmatch(size):
                raise HttpError(f"a chunk's size is {line[:20]!r}")
            self._left = int(size, 16)
            self._in_trailer = self._left == 0


class UntilClosedBody:
    """A body that ends with its connection."""

    def __init__(self, sink: BodySink) -> None:
        self._sink = sink
        self.done = False
        self.has_surplus = False

    def feed(self, buffer: bytes | bytearray, start: int, end: int) -> None:
        self._sink(buffer, start, end)


Body = CountedBody | ChunkedBody | UntilClosedBody


def body_of(head: ReplyHead, sink: BodySink, skipper: Skipper | None = None) -> Body:
    if head.is_chunked:
        return ChunkedBody(sink)
    return UntilClosedBody(sink) if head.length is None else CountedBody(head.length, sink, skipper)
