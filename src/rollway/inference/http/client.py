"""An HTTP/1.1 client of one server, made for large bodies.

All connections read into one small buffer that stays warm in the cache. A body is handed to its sink
in pieces and gathered nowhere on the way; until its reader wants it, it waits in the kernel.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from .connection import Connection
from .framing import BodySink, HttpAway, HttpError, ReplyHead, Skipper

READ_BYTES = 64 << 10
"""What is read from a socket at a time; uvloop reads at most 32 such pieces in a row."""
MAX_WAITING_BYTES = 1 << 20
"""What of an unread body waits in this machine's kernel; the rest stays with the server.

Left to itself a kernel takes up to 32 MB of each, and with hundreds of bodies comes to the end of its
memory for TCP. Then no connection gets on, not even those being read. Less than this costs CPU: the
window is opened more often.
"""


class HttpReply:
    """A reply whose head has come."""

    def __init__(self, connection: Connection, head: ReplyHead) -> None:
        self._connection = connection
        self.head = head
        self.is_read = False

    async def read(self, sink: BodySink, skipper: Skipper | None = None) -> None:
        await self._connection.read(self.head, sink, skipper)
        self.is_read = True


ConnectionCheck = Callable[[Connection], Awaitable[None]]


class HttpClient:
    """Requests to one server, each on a connection of its own while it lasts; idle ones are kept.

    `headers` go with every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise HttpError(f"{url!r} is not the address of an HTTP server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HttpError(f"{url!r} is not the address of an HTTP server")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._headers = "".join(_header(name, value) for name, value in (headers or {}).items())
        self._idle: list[Connection] = []
        self._scratch = bytearray(READ_BYTES)

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json",
        vouch: ConnectionCheck | None = None,
    ) -> AsyncIterator[HttpReply]:  # fmt: skip
        """A reply to be read within the block; leaving it early ends the connection. `vouch` may speak
        on the connection first, and raise to refuse it."""
        connection, head = await self._ask(self._encoded(method, path, body, accept), vouch)
        reply = HttpReply(connection, head)
        try:
            yield reply
        finally:
            if reply.is_read and not head.closes and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()

    async def ask_on(self, connection: Connection, path: str) -> HttpReply:
        """The reply to a GET on a connection that `vouch` looks at; it must be read."""
        return HttpReply(connection, await connection.ask(self._encoded("GET", path)))

    def _encoded(
        self, method: str, path: str, body: bytes = b"", accept: str = "application/json"
    ) -> bytes:
        return (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nAccept: {accept}\r\n"
            f"{self._headers}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def _ask(self, request: bytes, vouch: ConnectionCheck | None) -> tuple[Connection, ReplyHead]:
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
            except BaseException:  # cancelled, or refused by `vouch`: nobody else would close it
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
            except asyncio.CancelledError:
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
