"""One connection to an HTTP/1.1 server: it carries one request and its reply at a time."""

import asyncio
from typing import cast

from . import discard, framing
from .framing import BodySink, CountedBody, HttpAway, HttpError, ReplyHead, Skipper

HEAD_BYTES = 4096
"""How much is read at a time before the body is asked for. When all replies arrive at once, for example
after the machine paused, the loop reads only this much of each and not everything that has arrived."""


IDLE_S = 20.0
"""How long a server may send nothing once a body has begun."""


class Connection(asyncio.BufferedProtocol):
    """Reads into `scratch`, a buffer that all connections of a client share. A body that is not read
    yet waits in the kernel, and bytes that its sink does not need are thrown away there."""

    def __init__(self, scratch: bytearray, idle_s: float = IDLE_S) -> None:
        self._scratch = scratch
        self._idle_s = idle_s
        self._view = memoryview(scratch)
        self._transport: asyncio.Transport
        self._received = bytearray()
        """Bytes of the reply that nothing has parsed yet."""
        self._head: asyncio.Future[ReplyHead] | None = None
        self._body: framing.Body | None = None
        self._body_end: asyncio.Future[None] | None = None
        self._discard: discard.KernelDiscard | None = None
        self.is_open = False
        self.has_received = False
        """True once the server has sent a byte since the last request."""
        self.checked_version = -1
        """The newest version that the process at the other end was found to have. The code that checks
        the connection sets it."""
        self._lost: Exception | None = None
        self._num_reads = 0

    async def ask(self, request: bytes) -> ReplyHead:
        """Send a request and return the head of its reply. The body waits until `read` is called."""
        self.has_received = False
        if not self.is_open:
            raise HttpAway("the connection was closed")
        self._received.clear()
        self._head = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._head

    async def read(self, head: ReplyHead, sink: BodySink, skipper: Skipper | None) -> None:
        """Feed the whole body to `sink`, except for the bytes that `skipper` does not need."""
        # encrypted bytes must be read to be decrypted
        is_encrypted = self._transport.get_extra_info("ssl_object") is not None
        can_discard = discard.IS_POSSIBLE and not is_encrypted
        body = framing.make_body(head, sink, skipper if can_discard else None)
        received, self._received = self._received, bytearray()
        body.feed(received, 0, len(received))
        self._body_end = asyncio.get_running_loop().create_future()
        self._body = body
        if body.done:
            self._end()
        if self.is_open:
            # for the rest of this body, or for the next reply
            self._transport.resume_reading()
        else:
            self._on_lost()
        try:
            await self._wait_for(self._body_end)
        finally:
            self._body = None
        # surplus bytes would be taken for the next reply
        if body.has_surplus:
            self.close()

    async def _wait_for(self, body_end: "asyncio.Future[None]") -> None:
        """Wait for the end of a body. A server that stops in the middle of it is given up: others wait
        for the place that this body has."""
        while not body_end.done():
            before = self._progress
            await asyncio.wait([body_end], timeout=self._idle_s)
            if not body_end.done() and self._progress == before:
                raise HttpAway(
                    f"the server sent nothing for {self._idle_s:g} s in the middle of a reply",
                    request_was_sent=True,
                )
        body_end.result()

    @property
    def _progress(self) -> tuple[int, int]:
        return self._num_reads, self._discard.num_left if self._discard else 0

    def close(self) -> None:
        self.is_open = False
        self._stop_discard()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return a view, because TLS writes to slices of it, and slices of a bytearray are copies."""
        return self._view if self._body is not None else self._view[:HEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.has_received = True
        self._num_reads += 1
        try:
            if self._body is not None:
                self._on_body(self._body, nbytes)
            else:
                self._received += self._view[:nbytes]
                self._on_head()
        except Exception as error:
            # an error of the sink goes to the reader of the body
            self._fail(error)
            self.close()

    def _on_head(self) -> None:
        """Parse the head once it is complete, then stop reading until the body is asked for."""
        if self._head is None or self._head.done():
            raise HttpError("the server sent data without a request")
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            limit = framing.MAX_HEAD_BYTES
            if len(self._received) > limit:
                raise HttpError(f"the head of the reply is longer than {limit} bytes")
            return
        head = framing.parse_head(bytes(self._received[:end]))
        del self._received[: end + 4]
        if head.status < 200:
            # 100 Continue, for example: the real reply follows
            self._on_head()
            return
        if head.length is None or len(self._received) < head.length:
            self._transport.pause_reading()
        self._head.set_result(head)

    def _on_body(self, body: framing.Body, nbytes: int) -> None:
        body.feed(self._scratch, 0, nbytes)
        if body.done:
            self._end()
        elif isinstance(body, CountedBody) and body.num_unneeded >= discard.MIN_BYTES:
            self._skip(body)

    def _skip(self, body: CountedBody) -> None:
        """Let the kernel throw away the unneeded bytes, then continue reading after them."""

        def resume(num_bytes: int) -> None:
            self._discard = None
            body.skip(num_bytes)
            if body.done:
                self._end()
            self._transport.resume_reading()

        self._transport.pause_reading()
        sock = self._transport.get_extra_info("socket")
        self._discard = discard.KernelDiscard(sock, body.num_unneeded, resume)

    def _stop_discard(self) -> None:
        if self._discard is not None:
            self._discard.close()
            self._discard = None

    def _end(self) -> None:
        if self._body_end is not None and not self._body_end.done():
            self._body_end.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._stop_discard()
        self._lost = exc
        self._on_lost()

    def _on_lost(self) -> None:
        if isinstance(self._body, framing.UntilClosedBody) and self._lost is None:
            self._end()
        reason = self._lost or "the server closed the connection"
        self._fail(HttpAway(str(reason), request_was_sent=True))

    def _fail(self, error: Exception) -> None:
        for waiting in (self._head, self._body_end):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                # marks it as seen: its reader may be gone
                waiting.exception()
