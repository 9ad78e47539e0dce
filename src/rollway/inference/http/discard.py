"""Throws away bytes that arrive on a connection without copying them out of the kernel."""

import asyncio
import mmap
import socket
import sys
from collections.abc import Callable

IS_POSSIBLE = sys.platform == "linux"
"""On other systems recv with MSG_TRUNC copies the bytes."""
MIN_BYTES = 256 << 10
"""For fewer bytes, setting up a KernelDiscard costs more than reading and ignoring them."""
MAX_BYTES = 4 << 20
"""How many bytes one call throws away at most."""
WAKE_SHARE = 4
"""The loop is woken when a quarter of the socket's receive buffer is full. This must be less than the
TCP window of an empty buffer: the peer never sends more than that window at once, so with a higher mark
the peer and this side would wait for each other forever."""


class KernelDiscard:
    """Throws away the next `num_bytes` of a socket, then calls `on_end` with the number thrown away. It
    is smaller if the peer closes the connection first. The transport that owns the socket must not read
    meanwhile. Its descriptor is registered with the loop, so this waits on a duplicate."""

    def __init__(
        self, sock: socket.socket, num_bytes: int, on_end: Callable[[int], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = socket.fromfd(sock.fileno(), sock.family, sock.type)
        self._num_bytes = self._left = num_bytes
        self._on_end = on_end
        buffer_bytes = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._wake_bytes = max(1, buffer_bytes // WAKE_SHARE)
        self._wake_loop_at(min(num_bytes, self._wake_bytes))
        self._loop.add_reader(self._sock, self._discard)
        # a full buffer may have closed the window already
        self._loop.call_soon(self._discard)

    @property
    def num_left(self) -> int:
        return self._left

    def _discard(self) -> None:
        if self._sock.fileno() < 0:
            return
        limit = min(self._left, MAX_BYTES)
        try:
            num_discarded = self._sock.recv_into(_UNUSED, limit, socket.MSG_TRUNC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            num_discarded = 0  # the transport will report the error
        self._left -= num_discarded
        if not num_discarded or not self._left:
            self.close()
            self._on_end(self._num_bytes - self._left)
        elif self._left < self._wake_bytes:
            self._wake_loop_at(self._left)

    def _wake_loop_at(self, num_bytes: int) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            # The option belongs to the socket, which the transport shares: without its default the
            # transport would not be woken for the small pieces that follow.
            self._wake_loop_at(1)
            self._sock.close()


_UNUSED = mmap.mmap(-1, MAX_BYTES)
"""Memory that recv_into needs and never writes to, so that the kernel never gives it pages."""
