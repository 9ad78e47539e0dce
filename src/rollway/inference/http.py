"""An HTTP/1.1 client of one server, made for large bodies.

All connections read into one small buffer that stays warm in the cache. A body is handed to its sink
in pieces and gathered nowhere on the way; until its reader wants it, it waits in the kernel.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

from .discard import IS_POSSIBLE, MIN_BYTES, Discard
from .framing import (
    MAX_HEAD_BYTES,
    Body,
    Counted,
    Head,
    HttpAway,
    HttpError,
    Sink,
    Skipper,
    UntilClosed,
    body_of,
    parse_head,
)

READ_BYTES = 64 << 10
"""What is read from a socket at a time; uvloop reads at most 32 such pieces in a row."""
MAX_WAITING_BYTES = 1 << 20
"""What of an unread body waits in this machine's kernel; the rest stays with the server.

Left to itself a kernel takes up to 32 MB of each, and with hundreds of bodies comes to the end of its
memory for TCP. Then no connection gets on, not even those being read. Less than this costs CPU: the
window is opened more often.
"""


class Connection(asyncio.BufferedProtocol):
    """One connection: a request, its reply's head, its body, and the next request."""

    def __init__(self, scratch: bytearray) -> None:
        self._scratch = scratch
        self._view = memoryview(scratch)
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._head: asyncio.Future[Head] | None = None
        self._body: Body | None = None
        self._ended: asyncio.Future[None] | None = None
        self._discard: Discard | None = None
        self.is_open = False
        self.heard = False
        self.vouched = 0
        """For its user: up to what the process at its other end was found good."""
        self._lost: Exception | None = None

    async def ask(self, request: bytes) -> Head:
        """Send a request; the head of its reply. The body waits until it is read."""
        assert self._transport is not None
        self.heard = False
        if not self.is_open:
            raise HttpAway("the connection was closed")
        self._early.clear()
        self._head = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._head

    async def read(self, head: Head, sink: Sink, skipper: Skipper | None) -> None:
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
        return self._view  # TLS writes to slices of it, and those of a bytearray are copies

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = True
        try:
            if self._body is not None:
                self._on_body(self._body, nbytes)
            else:
                self._on_head(nbytes)
        except Exception as error:
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
        elif isinstance(body, Counted) and body.num_unneeded >= MIN_BYTES:
            self._skip(body)

    @property
    def _can_discard(self) -> bool:
        """What is encrypted must be read."""
        assert self._transport is not None
        return IS_POSSIBLE and self._transport.get_extra_info("ssl_object") is None

    def _skip(self, body: Counted) -> None:
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
        self._discard = Discard(sock, body.num_unneeded, go_on)

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
        if isinstance(self._body, UntilClosed) and self._lost is None:
            self._end()
        how = str(self._lost) if self._lost else "the server closed the connection"
        self._fail(HttpAway(how, was_asked=True))

    def _fail(self, error: Exception) -> None:
        for waiting in (self._head, self._ended):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # its reader may be gone


class Reply:
    """A reply whose head has come."""

    def __init__(self, connection: Connection, head: Head) -> None:
        self._connection = connection
        self.head = head
        self.is_read = False

    async def read(self, sink: Sink, skipper: Skipper | None = None) -> None:
        await self._connection.read(self.head, sink, skipper)
        self.is_read = True


Vouch = Callable[[Connection], Awaitable[None]]


class HttpClient:
    """Requests to one server, each on a connection of its own while it lasts; idle ones are kept.

    `headers` go with every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{url!r} is not the address of an HTTP server")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._headers = "".join(_header(name, value) for name, value in (headers or {}).items())
        self._idle: list[Connection] = []
        self._scratch = bytearray(READ_BYTES)

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json",
        vouch: Vouch | None = None,
    ) -> AsyncIterator[Reply]:  # fmt: skip
        """A reply to be read within the block; leaving it early ends the connection. `vouch` may speak
        on the connection first, and raise to refuse it."""
        connection, head = await self._ask(self._encoded(method, path, body, accept), vouch)
        reply = Reply(connection, head)
        try:
            yield reply
        finally:
            if reply.is_read and not head.closes and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()

    async def ask_on(self, connection: Connection, path: str) -> Reply:
        """The reply to a GET on a connection that `vouch` looks at; it must be read."""
        return Reply(connection, await connection.ask(self._encoded("GET", path)))

    def _encoded(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json"
    ) -> bytes:
        return (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nAccept: {accept}\r\n"
            f"{self._headers}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def _ask(self, request: bytes, vouch: Vouch | None) -> tuple[Connection, Head]:
        """On an idle connection if there is one. A server may hang up on it just then: ask again."""
        while True:
            idle = self._take_idle()
            connection = idle or await self._connect()
            try:
                if vouch is not None:
                    await vouch(connection)
                return connection, await connection.ask(request)
            except HttpError:
                connection.close()
                if idle is None or connection.heard:
                    raise
            except BaseException:
                connection.close()
                raise

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            sock = await self._socket(loop)
            _, connection = await loop.create_connection(
                lambda: Connection(self._scratch), sock=sock, ssl=self._tls,
                server_hostname=self._host if self._tls else None,
            )  # fmt: skip
        except OSError as error:
            raise HttpAway(f"cannot connect: {error}") from None
        return connection

    async def _socket(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """Connected to the first of the host's addresses that answers."""
        failed = OSError(f"{self._host} has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_WAITING_BYTES)
            try:
                await loop.sock_connect(sock, address)
                return sock
            except OSError as error:
                sock.close()
                failed = error
            except BaseException:
                sock.close()
                raise
        raise failed

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _header(name: str, value: str) -> str:
    """A header's line. What a bad one holds may be a secret, so it is not shown."""
    if not (value.isascii() and value.isprintable()):
        raise HttpError(f"the value for the header {name} is not one line of ASCII text")
    return f"{name}: {value}\r\n"
