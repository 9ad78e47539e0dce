"""An HTTP/1.1 client of one server, made for large bodies.

All connections read into one small buffer that stays warm in the cache. A body goes to its sink piece by
piece and is never gathered on the way. Until it is read, it waits in the kernel.
"""

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from .connection import IDLE_S, Connection, encrypt
from .endpoint import MAX_BODY_BYTES, check_header, split_url
from .framing import JSON, BodySink, Bytes, HttpAway, HttpError, ReplyHead, Skipper

READ_BYTES = 64 << 10
"""How much is read from a socket at a time."""
MAX_IDLE_S = 60.0
MAX_WAITING_BYTES = 1 << 20
"""How much of an unread body waits in this machine's kernel. The rest stays with the server.

Without this limit a kernel takes up to 32 MB of each body, and hundreds of bodies use up its memory for
TCP. Then every connection stalls, even those being read. A smaller limit costs CPU time, because the TCP
window is opened more often.
"""


class HttpReply:
    """A reply whose head has arrived and whose body has not been read."""

    def __init__(self, connection: Connection, head: ReplyHead) -> None:
        self.connection = connection
        self.head = head
        self.is_read = False

    async def read(self, sink: BodySink, skipper: Skipper | None = None) -> None:
        await self.connection.read(self.head, sink, skipper)
        self.is_read = True

    async def read_all(self) -> bytearray:
        """Read a small body. A body above MAX_BODY_BYTES raises HttpError."""
        body = bytearray()

        def take(buffer: Bytes, start: int, end: int) -> None:
            if len(body) + end - start > MAX_BODY_BYTES:
                raise HttpError(f"the reply has a body of more than {MAX_BODY_BYTES} bytes")
            body.extend(memoryview(buffer)[start:end])

        await self.read(take)
        return body


ConnectionCheck = Callable[[Connection], Awaitable[None]]
"""May ask something on a connection before it is used, and raises to refuse the connection."""


class HttpClient:
    """Sends requests to one server, all with the same `headers`. Each request has a connection to
    itself, and idle ones are reused."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """`idle_s` is how long the server may send nothing in the middle of a body."""
        parts = split_url(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        lines = [_header_line(name, value) for name, value in (headers or {}).items()]
        self._headers = "".join(lines)
        self._idle: deque[tuple[float, Connection]] = deque()
        """Connections and when they were used last, the oldest first."""
        self._scratch = bytearray(READ_BYTES)
        self._idle_s = idle_s

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", accept: str = JSON,
        check: ConnectionCheck | None = None,
    ) -> AsyncIterator[HttpReply]:  # fmt: skip
        """Give the reply to the block, which reads it."""
        reply = await self.ask(method, path, body, accept, check)
        try:
            yield reply
        finally:
            self.give_back(reply)

    async def ask(
        self, method: str, path: str, body: bytes = b"", accept: str = JSON,
        check: ConnectionCheck | None = None,
    ) -> HttpReply:  # fmt: skip
        """Return a reply whose body is not read yet. The caller must give it back. `check` is called
        with the connection before the request is sent."""
        return await self._ask(self._encode(method, path, body, accept), check)

    def give_back(self, reply: HttpReply) -> None:
        """Keep the connection of a reply for the next request. If its body was not read to the end, the
        connection is closed."""
        connection = reply.connection
        if reply.is_read and connection.is_open and not reply.head.closes:
            self._keep(connection)
        else:
            connection.close()

    async def fetch(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[ReplyHead, bytearray]:
        """Return a small reply, whatever its status."""
        async with self.request(method, path, body) as reply:
            return reply.head, await reply.read_all()

    async def get_on(self, connection: Connection, path: str) -> HttpReply:
        """Send a GET on a connection that is being checked. The caller must read the whole reply."""
        return HttpReply(connection, await connection.ask(self._encode("GET", path)))

    def _encode(self, method: str, path: str, body: bytes = b"", accept: str = JSON) -> bytes:
        return (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nAccept: {accept}\r\n"
            f"{self._headers}Content-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def _ask(self, request: bytes, check: ConnectionCheck | None) -> HttpReply:
        """Send the request on an idle connection, or on a new one. The server may close an idle
        connection at this very moment, so a request that got no byte back is sent again."""
        while True:
            idle = self._take_idle()
            connection = idle or await self._connect()
            try:
                if check is not None:
                    await check(connection)
                return HttpReply(connection, await connection.ask(request))
            except BaseException as error:
                # also if cancelled, or refused by `check`: nothing else would close it
                connection.close()
                may_repeat = isinstance(error, HttpError) and not connection.has_received
                if idle is None or not may_repeat:
                    raise

    def _keep(self, connection: Connection) -> None:
        """Keep a connection for the next request, and close those that nothing has needed for long."""
        now_s = time.monotonic()
        self._idle.append((now_s, connection))
        while self._idle[0][0] < now_s - MAX_IDLE_S:
            self._idle.popleft()[1].close()

    def _take_idle(self) -> Connection | None:
        """Return the connection that was used last: the others may become old and be closed."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            sock = await self._open_socket(loop)
            if self._tls is not None:
                sock = await encrypt(sock, self._tls, self._host)
        except OSError as error:
            raise HttpAway(f"cannot connect: {error}") from None
        return Connection(sock, self._scratch, self._idle_s)

    async def _open_socket(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """Return a socket that is connected to the first of the host's addresses that answers."""
        failed = OSError(f"{self._host} has no address")
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MAX_WAITING_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()


def _header_line(name: str, value: str) -> str:
    check_header(name, value)
    return f"{name}: {value}\r\n"
