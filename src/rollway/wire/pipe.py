"""Length-prefixed frames on a socket pair between a parent process and its child.

The parent and asynchronous children hold an `AsyncPipe`; children that only compute hold a
`BlockingPipe`. End of file means that the other process is gone.
"""

import asyncio
import select
import socket
import struct
from typing import Self

from ..errors import ProtocolError

_LENGTH = struct.Struct("<Q")
Buffer = bytes | bytearray | memoryview
MAX_FRAME_BYTES = 4 << 30
NOT_A_FRAME = (
    "its pipe holds bytes that are not a message: its code wrote to all open descriptors"
)
CONGESTED_BYTES = 256 << 10
"""More unsent bytes than this mean that the reader does not keep up. Fewer may be the last writes."""


class AsyncPipe:
    """Frames on an event loop. Sending waits while the other side is slow."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=1 << 20))

    @property
    def is_congested(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > CONGESTED_BYTES

    async def send(self, frame: Buffer) -> None:
        """Queue a frame and wait until the pipe has room again. Raise if the other side is gone."""
        if self._writer.is_closing():
            raise ConnectionResetError("the other side is gone")
        view = memoryview(frame)
        self._writer.write(_LENGTH.pack(view.nbytes))
        self._writer.write(view)
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        """Wait for the next frame; return None when the other side is gone. Raise ProtocolError
        if the bytes are not a frame: code there has written to descriptors that are not its own."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(NOT_A_FRAME)
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once. What has arrived can still be received."""
        self._writer.transport.abort()


class BlockingPipe:
    """Frames in a process without an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)

    def send(self, frame: Buffer) -> None:
        view = memoryview(frame)
        self._sock.sendall(_LENGTH.pack(view.nbytes))
        self._sock.sendall(view)

    def ready(self, timeout_s: float | None) -> bool:
        """Return whether a frame, or the end, can be read within `timeout_s`. None waits forever."""
        return bool(select.select([self._sock], [], [], timeout_s)[0])

    def receive(self) -> bytes | None:
        """Wait for the next frame; return None when the other side is gone."""
        head = self._read_exactly(_LENGTH.size)
        return None if head is None else self._read_exactly(_LENGTH.unpack(head)[0])

    def _read_exactly(self, length: int) -> bytes | None:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            try:
                count = self._sock.recv_into(view)
            except ConnectionError:
                return None
            if not count:
                return None
            view = view[count:]
        return bytes(buffer)
