"""Parses the head of an HTTP/1.1 reply and finds where its body ends. Pure."""

import re
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

JSON = "application/json"
MAX_HEAD_BYTES = 64 << 10
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")

Bytes = bytes | bytearray
BodySink = Callable[[Bytes, int, int], None]
"""Takes `buffer[start:end]`. The buffer is written to again as soon as the call returns."""


class Skipper(Protocol):
    """Tells the connection how many of the next bytes a sink does not need."""

    @property
    def num_unneeded(self) -> int: ...

    def skip(self, num_bytes: int) -> None:
        """Note that `num_bytes` of the body were thrown away instead of fed to the sink."""


class HttpError(ConnectionError):
    """The server cannot be reached, closed the connection, or does not speak HTTP."""


class HttpAway(HttpError):
    """The server cannot be reached, or closed the connection. `request_was_sent` tells these apart."""

    def __init__(self, message: str, *, request_was_sent: bool = False) -> None:
        super().__init__(message)
        self.request_was_sent = request_was_sent


class ReplyHead(Struct, frozen=True):
    """A reply's status and headers. `length` is None if the head does not say how long the body is."""

    status: int
    headers: dict[str, str]

    @property
    def length(self) -> int | None:
        if self.status in (204, 304):
            return 0
        text = self.headers.get("content-length")
        if self.is_chunked or text is None:
            return None
        if not (text.isascii() and text.isdigit()):
            raise HttpError(f"the Content-Length of the reply is {text!r}, not a number")
        return int(text)

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def closes(self) -> bool:
        has_no_end = self.length is None and not self.is_chunked
        return has_no_end or self.headers.get("connection", "").lower() == "close"


def parse_head(text: bytes) -> ReplyHead:
    """Parse the head of a reply: all bytes before the empty line."""
    status_line, *lines = text.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()):
        raise HttpError(f"this is not an HTTP reply: {status_line[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return ReplyHead(int(code), headers)


class CountedBody:
    def __init__(self, length: int, sink: BodySink, skipper: Skipper | None) -> None:
        self._left = length
        self._sink = sink
        self._skipper = skipper
        self.done = length == 0
        self.has_surplus = False

    def feed(self, buffer: Bytes, start: int, end: int) -> None:
        taken = min(end - start, self._left)
        if taken:
            self._sink(buffer, start, start + taken)
        self._left -= taken
        self.done = self._left == 0
        self.has_surplus |= taken < end - start

    @property
    def num_unneeded(self) -> int:
        return min(self._left, self._skipper.num_unneeded) if self._skipper else 0

    def skip(self, num_bytes: int) -> None:
        assert self._skipper is not None
        self._skipper.skip(num_bytes)
        self._left -= num_bytes
        self.done = self._left == 0


class ChunkedBody:
    """A body in chunks. A line with its size precedes each chunk, and size 0 ends the body."""

    def __init__(self, sink: BodySink) -> None:
        self._sink = sink
        self._left = 0
        self._line = bytearray()
        self._in_trailer = False
        self.done = False
        self.has_surplus = False

    def feed(self, buffer: Bytes, start: int, end: int) -> None:
        while start < end and not self.done:
            if self._left:
                taken = min(end - start, self._left)
                self._sink(buffer, start, start + taken)
                self._left -= taken
                start += taken
                continue
            newline = buffer.find(b"\n", start, end)
            line_end = end if newline < 0 else newline + 1
            self._line += buffer[start:line_end]
            start = line_end
            if newline >= 0:
                self._on_line(bytes(self._line).strip())
                self._line.clear()
            elif len(self._line) > MAX_HEAD_BYTES:
                limit = f"{MAX_HEAD_BYTES} bytes"
                raise HttpError(f"the line with a chunk's size is longer than {limit}")
        self.has_surplus |= start < end

    def _on_line(self, line: bytes) -> None:
        """Handle a line that is not data: a size, the empty line after a chunk, or a trailer line."""
        if self._in_trailer:
            self.done = not line
        elif line:
            size = line.partition(b";")[0].strip()
            if not _HEX.fullmatch(size):
                raise HttpError(f"a chunk's size is {line[:20]!r}, not a hexadecimal number")
            self._left = int(size, 16)
            self._in_trailer = self._left == 0


class UntilClosedBody:
    done = False
    has_surplus = False

    def __init__(self, sink: BodySink) -> None:
        self.feed = sink


Body = CountedBody | ChunkedBody | UntilClosedBody


def make_body(head: ReplyHead, sink: BodySink, skipper: Skipper | None = None) -> Body:
    coding = head.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise HttpError(f"the reply is compressed ({coding!r}), which was not asked for")
    if head.is_chunked:
        return ChunkedBody(sink)
    if head.length is None:
        return UntilClosedBody(sink)
    return CountedBody(head.length, sink, skipper)
