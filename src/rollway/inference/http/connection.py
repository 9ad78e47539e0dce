"""One connection to an HTTP/1.1 server: a request, its reply, and the next request."""

import asyncio
from typing import cast

from .discard import IS_POSSIBLE, MIN_BYTES, KernelDiscard
from .framing import (
    MAX_HEAD_BYTES,
    Body,
    BodySink,
    CountedBody,
    HttpAway,
    HttpError,
    ReplyHead,
    Skipper,
    UntilClosedBody,
    body_of,
    parse_head,
)

HEAD_BYTES = 4096
"""Read at a time before somebody wants the body. When all replies come at once, after a pause of the
machine say, the loop then has to read this much of each and not all that is there."""


class Connection(asyncio.BufferedProtocol):
    """Reads into `scratch`, which others read into as well. What of a body nobody reads yet waits in
    the kernel; what nobody needs is thrown away there."""

    def __init__(self, scratch: bytearray) -> None:
        self._scratch = scratch
        self._view = memoryview(scratch)
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._head: asyncio.Future[ReplyHead] | None = None
        self._body: Body | None = None
        self._ended: asyncio.Future[None] | None = None
        self._discard: KernelDiscard | None = None
        self.is_open = False
        self.heard = False
        self.vouched = 0
        """For its user: up to what the process at its other end was found good."""
        self._lost: Exception | None = None

    async def ask(self, request: bytes) -> ReplyHead:
        """Send a request; the head of its reply. The body waits until it is read."""
        assert self._transport is not None
        self.heard = False
        if not self.is_open:
            raise HttpAway("the connection was closed")
        self._early.clear()
        self._head = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._head

    async def read(self, head: ReplyHead, sink: BodySink, skipper: Skipper | None) -> None:
        """Feed the body to `sink` until its end, without what `skipper` can do without."""
        assert self._transport is not None
        body = body_of(head, sink, skipper if self._can_discard else None)
        early, self._early = self._early, bytearray()
        body.feed(early, 0, len(early))
        self._ended = asyncio.get_running_loop().create_future()
        self._body = body
        if body.done:
            self._end()
        if self.is_open:
            self._transport.resume_reading()  # for the rest of this body, or for the next reply
        else:
            self._on_lost()
        try:
            await self._ended
        finally:
            self._body = None
        if body.has_surplus:
            self.close()  # what it says next would be taken for the next reply

    def close(self) -> None:
        self.is_open = False
        self._stop_discard()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """A view: TLS writes to slices of it, and those of a bytearray are copies."""
        return self._view if self._body is not None else self._view[:HEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = True
        try:
            if self._body is not None:
                self._on_body(self._body, nbytes)
            else:
                self._on_head(nbytes)
        except Exception as error:  # a sink's own errors are for its reader, not for the loop
            self._fail(error)
            self.close()

    def _on_head(self, nbytes: int) -> None:
        """Gather until the empty line; what comes after it waits, and so does the socket."""
        assert self._transport is not None
        if self._head is None or self._head.done():
            raise HttpError("the server speaks without being asked")
        self._early += self._view[:nbytes]
        end = self._early.find(b"\r\n\r\n")
        if end < 0:
            if len(self._early) > MAX_HEAD_BYTES:
                raise HttpError(f"a head of more than {MAX_HEAD_BYTES} bytes")
            return
        head = parse_head(bytes(self._early[:end]))
        del self._early[: end + 4]
        if head.status < 200:  # 100 Continue and its like: the reply itself comes next
            early, self._early = self._early, bytearray()
            if early:
                self._scratch[: len(early)] = early
                self._on_head(len(early))
            return
        if head.length is None or len(self._early) < head.length:
            self._transport.pause_reading()
        self._head.set_result(head)

    def _on_body(self, body: Body, nbytes: int) -> None:
        body.feed(self._scratch, 0, nbytes)
        if body.done:
            self._end()
        elif isinstance(body, CountedBody) and body.num_unneeded >= MIN_BYTES:
            self._skip(body)

    @property
    def _can_discard(self) -> bool:
        """What is encrypted must be read."""
        assert self._transport is not None
        return IS_POSSIBLE and self._transport.get_extra_info("ssl_object") is None

    def _skip(self, body: CountedBody) -> None:
        """Leave to the kernel what nobody needs, and read on after it."""
        assert self._transport is not None
        transport = self._transport

        def go_on(num_bytes: int) -> None:
            self._discard = None
            body.skip(num_bytes)
            if body.done:
                self._end()
            transport.resume_reading()

        transport.pause_reading()
        sock = transport.get_extra_info("socket")
        self._discard = KernelDiscard(sock, body.num_unneeded, go_on)

    def _stop_discard(self) -> None:
        if self._discard is not None:
            self._discard.close()
            self._discard = None

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._stop_discard()
        self._lost = exc
        self._on_lost()

    def _on_lost(self) -> None:
        if isinstance(self._body, UntilClosedBody) and self._lost is None:
            self._end()
        how = str(self._lost) if self._lost else "the server closed the connection"
        self._fail(HttpAway(how, was_asked=True))

    def _fail(self, error: Exception) -> None:
        for waiting in (self._head, self._ended):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # its reader may be gone
