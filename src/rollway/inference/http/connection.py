"""One connection to an HTTP/1.1 server: it carries one request and its reply at a time."""

import asyncio
import socket
import ssl

from . import discard, framing
from .framing import BodySink, CountedBody, HttpAway, HttpError, ReplyHead, Skipper
from .ready import ready_sockets

HEAD_BYTES = 4096
"""How much is read at a time before the body is asked for. When all replies arrive at once, for example
after the machine paused, the loop reads only this much of each and not everything that has arrived."""
MAX_READS = 16
"""How many pieces of a body are read in a row before the loop may do something else."""
IDLE_S = 10.0
"""How long a server may send nothing once a body has begun."""
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """Reads into `scratch`, a buffer that all connections of a client share. A body that is not read
    yet waits in the kernel, and bytes that its sink does not need are thrown away there."""

    def __init__(
        self, sock: socket.socket, scratch: bytearray, idle_s: float = IDLE_S
    ) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._is_encrypted = isinstance(sock, ssl.SSLSocket)
        self._ready = ready_sockets()
        self._loop = asyncio.get_running_loop()
        self._scratch = scratch
        self._view = memoryview(scratch)
        self._idle_s = idle_s
        self._received = bytearray()
        """Bytes of the reply that nothing has parsed yet."""
        self._head: asyncio.Future[ReplyHead] | None = None
        self._body: framing.Body | None = None
        self._body_end: asyncio.Future[None] | None = None
        self._discard: discard.KernelDiscard | None = None
        self.is_open = True
        self.has_received = False
        """True once the server has sent a byte since the last request."""
        self.checked_version = -1
        """The newest version that the process at the other end was found to have. The code that checks
        the connection sets it."""
        self._lost: Exception | None = None
        self._num_reads = 0
        self._is_writable: asyncio.Event | None = None
        """Set once the socket takes more of a request. None unless a request waits for that."""
        self._go_on_reading()

    async def ask(self, request: bytes) -> ReplyHead:
        """Send a request and return the head of its reply. The body waits until `read` is called."""
        self.has_received = False
        if not self.is_open:
            raise HttpAway("the connection was closed")
        self._received.clear()
        self._head = self._loop.create_future()
        await self._send(request)
        return await self._head

    async def _send(self, request: bytes) -> None:
        left = memoryview(request)
        while left and self.is_open:
            try:
                left = left[self._sock.send(left) :]
            except NOT_NOW:
                await self._until_writable()
            except OSError as error:
                self._on_lost(error)

    async def _until_writable(self) -> None:
        self._is_writable = asyncio.Event()
        self._loop.add_writer(self._fd, self._is_writable.set)
        try:
            await self._is_writable.wait()
        finally:
            self._loop.remove_writer(self._fd)
            self._is_writable = None

    async def read(self, head: ReplyHead, sink: BodySink, skipper: Skipper | None) -> None:
        """Feed the whole body to `sink`, except for the bytes that `skipper` does not need."""
        # encrypted bytes must be read to be decrypted
        can_discard = discard.IS_POSSIBLE and not self._is_encrypted
        body = framing.make_body(head, sink, skipper if can_discard else None)
        received, self._received = self._received, bytearray()
        body.feed(received, 0, len(received))
        if not body.done:
            await self._read_rest(body)
        elif self.is_open:
            self._go_on_reading()  # for the next reply
        # surplus bytes would be taken for the next reply
        if body.has_surplus:
            self.close()

    async def _read_rest(self, body: framing.Body) -> None:
        self._body_end = self._loop.create_future()
        self._body = body
        try:
            if self.is_open:
                self._go_on_reading()
            else:
                self._on_lost(self._lost)
            await self._wait_for(self._body_end)
        finally:
            self._body = self._discard = None

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
        if self.is_open:
            self.is_open = False
            self._ready.unwatch(self._fd)
            if self._is_writable is not None:
                self._loop.remove_writer(self._fd)
                self._is_writable.set()
            self._sock.close()

    def _go_on_reading(self) -> None:
        self._ready.watch(self._fd, self._on_readable)
        if self._is_encrypted and self._sock.pending():  # type: ignore[attr-defined]
            # these bytes are in this process already, so the kernel does not tell of them
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        """Read what has arrived: one piece of a head, or several of a body."""
        for _ in range(MAX_READS):
            if not self.is_open:
                return
            try:
                is_more = self._discard_some() if self._discard else self._read_piece()
            except NOT_NOW:
                return
            except OSError as error:
                self._on_lost(error)
                return
            except Exception as error:
                # an error of the sink goes to the reader of the body
                self._fail(error)
                self.close()
                return
            if not is_more:
                return
        if self._is_encrypted:
            self._go_on_reading()

    def _read_piece(self) -> bool:
        """Read a piece and hand it on. Return whether there may be more to read now."""
        view = self._view if self._body is not None else self._view[:HEAD_BYTES]
        num_bytes = self._sock.recv_into(view)
        if not num_bytes:
            self._on_lost(None)
            return False
        self.has_received = True
        self._num_reads += 1
        if self._body is not None:
            self._on_body(self._body, num_bytes)
            return not self._body.done and (self._is_encrypted or num_bytes == len(view))
        self._received += view[:num_bytes]
        self._on_head()
        return self._is_encrypted and self._head is not None and not self._head.done()

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
            self._ready.unwatch(self._fd)
        self._head.set_result(head)

    def _on_body(self, body: framing.Body, nbytes: int) -> None:
        body.feed(self._scratch, 0, nbytes)
        if body.done:
            self._end()
        elif isinstance(body, CountedBody) and body.num_unneeded >= discard.MIN_BYTES:
            self._discard = discard.KernelDiscard(self._sock, body.num_unneeded)

    def _discard_some(self) -> bool:
        """Let the kernel throw away unneeded bytes. Return whether there may be more to read now."""
        assert self._discard is not None
        assert isinstance(self._body, CountedBody)
        num_bytes = self._discard.go_on()
        if not num_bytes:
            self._on_lost(None)
            return False
        self._body.skip(num_bytes)
        if not self._discard.num_left:
            self._discard = None
        if self._body.done:
            self._end()
        return not self._body.done

    def _end(self) -> None:
        if self._body_end is not None and not self._body_end.done():
            self._body_end.set_result(None)

    def _on_lost(self, error: Exception | None) -> None:
        self.close()
        self._lost = error
        if isinstance(self._body, framing.UntilClosedBody) and error is None:
            self._end()
        reason = error or "the server closed the connection"
        self._fail(HttpAway(str(reason), request_was_sent=True))

    def _fail(self, error: Exception) -> None:
        for waiting in (self._head, self._body_end):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                # marks it as seen: its reader may be gone
                waiting.exception()


async def encrypt(sock: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """Do the handshake of TLS on a connected socket that does not block."""
    wrapped = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    loop, fd, is_ready = asyncio.get_running_loop(), wrapped.fileno(), asyncio.Event()
    try:
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                add, remove = loop.add_reader, loop.remove_reader
            except ssl.SSLWantWriteError:
                add, remove = loop.add_writer, loop.remove_writer
            add(fd, is_ready.set)
            try:
                await is_ready.wait()
            finally:
                remove(fd)
                is_ready.clear()
    except BaseException:
        wrapped.close()
        raise
